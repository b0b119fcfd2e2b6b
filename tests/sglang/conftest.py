"""Real SGLang on the CPU: one server for most tests, and a trainer that stands still."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from rlkit_servers.sglang.launch import Launch

from rlkit.engines import SGLangServer
from rlkit.testing import random_model
from tests.served import RETRY, Trainer, second

__all__ = ["second"]

SHIM = Path(__file__).parent / "shim"
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(SHIM), os.environ.get("PYTHONPATH"))))


@pytest.fixture(scope="session")
def trainer() -> Iterator[Trainer]:
    trainer = Trainer(random_model("qwen2"))
    yield trainer
    trainer.runner.close()


@pytest.fixture(scope="session")
def engine(trainer: Trainer) -> Iterator[SGLangServer]:
    """A server that rlkit started, with the trainer's weights; it follows structures."""
    engine = SGLangServer(retry=RETRY, launch=Launch(structures=True))
    try:
        engine.bind(trainer.runtime)
        trainer.publish(engine)
        yield engine
    finally:
        engine.close()
