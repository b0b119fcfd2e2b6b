"""Three hundred malformed recipes, overrides and data files: none may end in a traceback, hang or be accepted."""

from __future__ import annotations

import pytest

from tests.flow.fuzz import run


@pytest.mark.slow
def test_what_is_malformed_is_refused_clearly_and_in_time() -> None:
    outcomes, wrong = run(300, seed=0)
    assert not wrong
    assert outcomes["clear"] > 200
