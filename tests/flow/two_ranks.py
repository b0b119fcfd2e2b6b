"""Run by test_two_ranks.py on each of two ranks: estimators and losses that measure a mini-batch on halves of a batch.

usage: torchrun --nproc-per-node=2 two_ranks.py OUT
"""

from __future__ import annotations

import sys
from itertools import compress

import torch
import torch.distributed as dist

from rlkit import losses
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.loss import PolicyLoss
from rlkit.registry import load_plugins
from rlkit.testing import example_batch
from rlkit.types import Batch, PolicyOutput, TrainBatch

ESTIMATORS: list[AdvantageEstimator] = [
    part.cls({"first": 1.0, "second": 0.5}) if part.name == "GDPO" else part.cls()
    for part in load_plugins(entry_points=False).parts["advantages"].values()
]
SELECTING = [losses.KLCov(fraction=0.1), losses.ClipCov(fraction=0.1, cov_low=0.0, cov_high=9.0)]


def whole() -> Batch:
    """Make 14 rows in five groups, one of them of one row, with all that any estimator reads.

    The second rank's groups, the odd ones, lack the second component.
    """
    generator = torch.Generator().manual_seed(3)
    groups = [0, 0, 0, 1, 1, 1, 1, 2, 3, 3, 3, 4, 4, 4]
    batch = example_batch(torch.rand(len(groups), generator=generator).round(decimals=1).tolist(), groups)
    shape = batch.mask.shape
    batch.values = torch.rand(shape, generator=generator) * batch.mask
    batch.sum_pi_squared = torch.rand(shape, generator=generator)
    batch.greedy_rewards = torch.rand(len(groups), generator=generator)
    batch.reference_rewards = torch.rand(len(groups), 3, generator=generator)
    batch.role, batch.role_names = torch.arange(len(groups)) % 2, ("first", "second")
    batch.components, batch.component_names = torch.rand(len(groups), 2, generator=generator), ("first", "second")
    batch.components[batch.group % 2 == 1, 1] = torch.nan
    return batch


def rows_of(rank: int, batch: Batch) -> tuple[torch.Tensor, Batch]:
    """Return the rows of a rank's groups, with the components that a sample of them has."""
    rows = (batch.group % 2 == rank).nonzero()[:, 0]
    mine = batch.rows(rows)
    reported = mine.components.isfinite().any(0)
    mine.component_names = tuple(compress(mine.component_names, reported.tolist()))
    mine.components = mine.components[:, reported]
    return rows, mine


def reduce(x: torch.Tensor) -> torch.Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def gather(x: torch.Tensor) -> torch.Tensor:
    everyone: list[torch.Tensor | None] = [None, None]
    dist.all_gather_object(everyone, x)
    return torch.cat([t for t in everyone if t is not None])


def results(batch: Batch, distributed: bool) -> dict[str, torch.Tensor]:
    """Return what each estimator and each selection makes of the rows."""
    found = {}
    for estimator in ESTIMATORS:
        if distributed:
            estimator.reduce = reduce
        estimator.estimate(batch)
        assert batch.advantages is not None
        found[type(estimator).__name__] = batch.advantages
    batch.advantages = (batch.rewards - 0.5)[:, None] * batch.mask
    for loss in SELECTING:
        if distributed:
            loss.reduce, loss.gather = reduce, gather
        found[type(loss).__name__] = loss.select(batch.rollout_logps, batch).float()
    return found | {"KTO": of_rows(losses.KTO(threshold=0.5), batch, distributed)}


def of_rows(loss: PolicyLoss, batch: Batch, distributed: bool) -> torch.Tensor:
    """Return a loss that measures the whole mini-batch first."""
    if distributed:
        loss.reduce = reduce
    ready = TrainBatch.of(batch)
    ready.ref_logps = 1.5 * batch.rollout_logps
    loss.select(batch.rollout_logps, ready)
    return loss(PolicyOutput(batch.rollout_logps, None), ready).per_token


if __name__ == "__main__":
    dist.init_process_group("gloo")
    batch = whole()
    rows, mine = rows_of(dist.get_rank(), batch)
    torch.save((rows, results(mine, distributed=True)), f"{sys.argv[1]}.{dist.get_rank()}")
    dist.destroy_process_group()
