"""Contracts take every correct part: losses that read any statistics, options that a base class documents."""

from __future__ import annotations

import pytest
from rlkit_authors.conformance import check_options

from rlkit.batch import LossOutput, PolicyOutput, Reads, TrainBatch
from rlkit.interfaces.loss import ForwardOptions, PolicyLoss
from rlkit.rewards import ExactReward
from rlkit.testing import check_loss

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
