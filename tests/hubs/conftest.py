"""Environments of our own, made with the real packages, where their processes find them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ENVIRONMENTS = str(Path(__file__).parent / "environments")


@pytest.fixture(autouse=True, scope="session")
def environments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ENVIRONMENTS)
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (ENVIRONMENTS, os.environ.get("PYTHONPATH")))))
        yield
