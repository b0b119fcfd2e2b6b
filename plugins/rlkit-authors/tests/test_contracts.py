"""Contracts take every correct part: losses that read any statistics, options that a base class documents."""

from __future__ import annotations

from typing import ClassVar

import pytest
from rlkit_authors.conformance import check_options

from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.fields import Field
from rlkit.interfaces.loss import ForwardOptions, PolicyLoss, TokenLoss
from rlkit.interfaces.reward import RewardFunction
from rlkit.interfaces.tool import State
from rlkit.rewards import ExactReward
from rlkit.testing import check_advantage, check_environment, check_loss, check_reward
from rlkit.types import Batch, LossOutput, PolicyOutput, Prompt, Reads, Score, TrainBatch, Trajectory

READS = {
    "top": Reads(top=4),
    "mean": Reads(mean=True),
    "squares": Reads(squares=True),
    "router": Reads(router=True),
    "all": Reads(top=1, mean=True, squares=True, router=True),
}


class ReadingLoss(PolicyLoss):
    """Adds a term for each statistic that it reads."""

    def __init__(self, reads: Reads) -> None:
        self.forward = ForwardOptions(reads)

    def __call__(self, policy: PolicyOutput, batch: TrainBatch) -> LossOutput:
        reads, loss = self.forward.statistics, -policy.logps * batch.advantages
        if reads.top:
            assert policy.top_ids is not None
            assert policy.top_logps is not None
            assert policy.top_ids.shape == (*policy.logps.shape, reads.top)
            loss = loss - policy.top_logps[..., : reads.top].exp().sum(-1)
        if reads.mean:
            loss = loss - policy.mean_logps
        if reads.squares:
            loss = loss + policy.sum_pi_squared
        if reads.router:
            loss = loss + policy.router_loss
        return LossOutput(loss * batch.mask, {})


@pytest.mark.parametrize("reads", READS.values(), ids=READS)
def test_a_loss_may_read_any_statistics(reads: Reads) -> None:
    check_loss(ReadingLoss(reads))


class Stricter(ExactReward):
    """Inherits its options."""


class Weighted(ExactReward):
    """Has an option of its own.

    Args:
        weight: How much.
    """

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight


class Heavier(Weighted):
    """Inherits a documented option."""


@pytest.mark.parametrize("part", [Stricter, Weighted, Heavier])
def test_inherited_options_are_documented(part: type) -> None:
    check_options(part)


class Progress(RewardFunction):
    """Fills a field by token, and adds what its options say.

    Args:
        fields: Further fields.
        rewards: Rewards by token; None for one of each.
    """

    fills = (Field("progress", "uint8"), Field("wide", by="row", shape=(2,)))

    def __init__(self, fields: dict[str, object], rewards: list[float] | None = None) -> None:
        self.fields = fields
        self.rewards = rewards

    def grade(self, trajectory: Trajectory) -> Score:
        count = trajectory.response_length
        rewards = [0.5] * count if self.rewards is None else self.rewards
        return Score(1.0, token_rewards=rewards, fields={"progress": [1] * count, **self.fields})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (Progress({}), None),
        (Progress({"wide": [0.5, 1.0]}), None),
        (Progress({"wide": 0.5}), r"'wide' with shape \(\), expected one of shape \(2,\) by row"),
        (Progress({"progres": 1}), "Progress.grade: .*filled the field 'progres', expected .*: progress, wide"),
        (Progress({}, [0.5] * 3), "Progress returned 3 token_rewards, expected 0: one for each token"),
    ],
)
def test_a_rewards_fields_are_those_that_it_declares(reward: Progress, message: str | None) -> None:
    if message is None:
        check_reward(reward)
        return
    with pytest.raises(AssertionError, match=message):
        check_reward(reward)


class Weighing(AdvantageEstimator):
    reads_fields = ("progress",)

    def estimate(self, batch: Batch) -> None:
        batch.advantages = batch.token_rewards * batch.fields["progress"]


class WeighingLoss(TokenLoss):
    reads_fields = ("progress",)

    def __call__(self, policy: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(-policy.logps * batch.fields["progress"], {})


def test_estimators_and_losses_are_tried_with_the_fields_that_they_read() -> None:
    batch = check_advantage(Weighing(), Progress.fills)
    assert batch.fields["progress"].tolist() == batch.mask.int().tolist()
    check_loss(WeighingLoss(), Progress.fills)
    with pytest.raises(AssertionError, match="Weighing reads the field 'progress'; pass its declaration in `fields`"):
        check_advantage(Weighing())
    with pytest.raises(AssertionError, match="WeighingLoss reads the field 'progress'"):
        check_loss(WeighingLoss())


class Steps(Environment):
    """Counts steps, by turn; its metric is what the class says."""

    fills = (Field("step", "int32", "turn"),)
    metrics: ClassVar[dict[str, float]] = {"length": 1.0}

    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        return "begin"

    async def step(self, action: str, state: State) -> Observation:
        state["steps"] = state.get("steps", 0) + 1
        return Observation("on", 0.0, state["steps"] == 2, {"step": state["steps"]}, self.metrics)


class StepsByToken(Steps):
    fills = (Field("step", "int32", "token"),)


class StepsWithoutName(Steps):
    metrics: ClassVar[dict[str, float]] = {"a b": 1.0}


def test_what_an_environment_fills_is_checked() -> None:
    check_environment(Steps)
    with pytest.raises(AssertionError, match="StepsByToken.step: declares .*, but such a part fills fields by turn or"):
        check_environment(StepsByToken)
    with pytest.raises(AssertionError, match="StepsWithoutName.step: added a metric named 'a b'"):
        check_environment(StepsWithoutName)
