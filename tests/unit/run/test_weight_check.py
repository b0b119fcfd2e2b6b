"""The check, before the first rollout, that the engine samples from the trainer's weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import nan

import pytest
import torch

from rlkit.base.errors import EngineError, PartError
from rlkit.commands import parse
from rlkit.data.data import Data, load_data
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.engines import TorchEngine
from rlkit.rollout.service import RolloutService
from rlkit.run.preflight.weight_check import check_weights
from rlkit.train.setup import prepare_rollouts
from rlkit.types import Completion, Request


@pytest.fixture(scope="module")
def run() -> Iterator[tuple[Data, RolloutService]]:
    recipe = parse("validate", ["--recipe=quickstart", "--rollout.max_gap=0.2", "--fabric.accelerator=cpu"]).recipe
    fabric = make_fabric(recipe.fabric)
    fabric.launch()
    data = load_data(recipe)
    rollouts = prepare_rollouts(recipe, data, fabric)
    with torch.no_grad():  # a policy that knows every answer has log-probs of 0, as a token that is masked has
        for weight in rollouts.actor.parameters():
            weight.mul_(0.5)
    rollouts.sync_weights()
    yield data, rollouts
    rollouts.close()


def prove_with(run: tuple[Data, RolloutService], gaps: list[float], monkeypatch: pytest.MonkeyPatch) -> float:
    """Check an engine whose i-th log-prob is off by `gaps[i]`."""
    ask = TorchEngine.generate

    async def wrong(engine: TorchEngine, request: Request) -> Completion:
        answer = await ask(engine, request)
        return replace(answer, logps=[answer.logps[0] + gaps[int(request.session.removeprefix("weight-check/"))]])

    monkeypatch.setattr(TorchEngine, "generate", wrong)
    return check_weights(*run)


def test_the_gap_is_a_mean(run: tuple[Data, RolloutService], monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 one token of four may be further off, as unlikely ones are: (0.4 + 0.2 + 0 + 0.1) / 4."""
    assert prove_with(run, [-0.4, -0.2, 0.0, -0.1], monkeypatch) == pytest.approx(0.175, abs=1e-4)


def test_an_engine_with_other_weights_is_refused(
    run: tuple[Data, RolloutService], monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"log-probs of 4 tokens are 0\.3 away from the trainer's on average, expected at most 0\.2"
    with pytest.raises(EngineError, match=message):
        prove_with(run, [-0.3] * 4, monkeypatch)


def test_bytes_of_weights_in_four_bits_do_not_widen_the_gap(
    run: tuple[Data, RolloutService], monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = torch.nn.Parameter(torch.zeros(2, dtype=torch.uint8), requires_grad=False)
    monkeypatch.setitem(run[1].actor._parameters, "codes", codes)
    monkeypatch.setattr(run[1].recipe.rollout, "max_gap", None)
    with pytest.raises(EngineError, match=r"expected at most 0\.001"):
        prove_with(run, [-0.1] * 4, monkeypatch)


@pytest.mark.parametrize("gap", [nan, 9.0])
def test_a_log_prob_that_is_none_is_refused(
    run: tuple[Data, RolloutService], gap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PartError, match="expected finite log-probs of at most 0"):
        prove_with(run, [0.0, gap, 0.0, 0.0], monkeypatch)


def test_weights_that_are_not_finite_are_refused(
    run: tuple[Data, RolloutService], monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = run[1].actor
    forward = actor.forward
    monkeypatch.setattr(actor, "forward", lambda *args, **_: forward(*args)._replace(logps=torch.full((1, 99), nan)))
    with pytest.raises(EngineError, match="inf away"):
        prove_with(run, [0.0] * 4, monkeypatch)
