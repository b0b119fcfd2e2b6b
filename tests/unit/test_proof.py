"""The proof, before the first rollout, that the engine samples from the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import nan

import pytest

from rlkit.cli.parser import parse
from rlkit.engines import TorchEngine
from rlkit.errors import EngineError
from rlkit.loop.data import load_data
from rlkit.loop.proof import prove
from rlkit.loop.run import Run
from rlkit.models.parallel import make_fabric
from rlkit.types import Completion, Request


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    recipe = parse("validate", ["--recipe=quickstart", "--rollout.max_gap=0.2", "--fabric.accelerator=cpu"]).recipe
    fabric = make_fabric(recipe.fabric)
    fabric.launch()
    live = Run(recipe, load_data(recipe), fabric, training=False)
    live.publish()
    yield live
    live.close()


def prove_with(run: Run, gaps: list[float], monkeypatch: pytest.MonkeyPatch) -> float:
    """Prove an engine whose i-th answer's log-prob is `gaps[i]` away from what it should be."""
    ask = TorchEngine.generate

    async def wrong(engine: TorchEngine, request: Request) -> Completion:
        answer = await ask(engine, request)
        return replace(answer, logps=[answer.logps[0] + gaps[int(request.session.removeprefix("proof/"))]])

    monkeypatch.setattr(TorchEngine, "generate", wrong)
    return prove(run)


def test_the_gap_is_a_mean(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """One token of four may be further away in bfloat16, as the least likely ones are: (0.4 + 0.2 + 0 + 0.1) / 4."""
    assert prove_with(run, [0.4, -0.2, 0.0, 0.1], monkeypatch) == pytest.approx(0.175, abs=1e-4)


@pytest.mark.parametrize(
    ("gaps", "said"),
    [([0.3, -0.3, 0.3, -0.3], "log-probs of 4 tokens are 0.3 away"), ([0.0, nan, 0.0, 0.0], "inf away")],
)
def test_an_engine_with_other_weights_is_refused(
    run: Run, gaps: list[float], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(EngineError, match=f"{said} from the trainer's on average, expected at most 0.2"):
        prove_with(run, gaps, monkeypatch)
