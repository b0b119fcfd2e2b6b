"""Which log-probs are computed before an update, at which temperature, and how the gap to the engine is measured."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlkit.advantages import OptimalTokenBaseline
from rlkit.models.packing import PackedPasses
from rlkit.recipe import Correction, Critic, KLLoss, KLReward, Rejection
from rlkit.rollout.collate import collate
from rlkit.testing import example_trajectory
from rlkit.train.logps import log_mismatch
from rlkit.train.metrics import Meter
from tests.unit.phases import LocalRanks, Trained, Values, compute_logps, context, ready, recipe, scored

LOGPS = [[0, 2, 3, 0], [0, 4, 0, 0], [0, 5, 1, 2], [0, 3, 2, 0]]
"""Of a `Line` with weight 1: the tokens under the mask."""


def test_on_policy_nothing_is_computed_before_the_update() -> None:
    batch, made = scored(), context(recipe())
    compute_logps(made, batch)
    assert (batch.trainer_logps, batch.old_logps, batch.ref_logps, batch.values) == (None, None, None, None)
    assert made.models.actor.seen == []


@pytest.mark.parametrize(
    "changes",
    [{"train": {"minibatches": 2}}, {"train": {"epochs": 2}}, {"correction": Correction()}, {"rejection": Rejection()},
     {"kl_reward": KLReward()}],
)  # fmt: skip
def test_the_old_policy_is_the_trainers_before_the_update(changes: dict[str, Any]) -> None:
    batch = scored()
    compute_logps(context(recipe(temperature=2.0, **changes)), batch)
    assert batch.trainer_logps is not None
    assert (2 * batch.trainer_logps).tolist() == LOGPS
    assert batch.old_logps is batch.trainer_logps
    assert batch.sum_pi_squared is None


def test_squares_are_computed_for_the_estimator_that_reads_them() -> None:
    batch = scored()
    compute_logps(context(recipe(advantage=OptimalTokenBaseline())), batch)
    assert torch.equal(batch.required("sum_pi_squared"), 0.25 * batch.mask)


def test_log_linear_old_log_probs_need_no_pass() -> None:
    batch = scored()
    made = context(recipe(train={"epochs": 2, "old_logps": "loglinear"}, correction=Correction()))
    compute_logps(made, batch)
    assert made.models.actor.seen == []
    assert (batch.trainer_logps, batch.old_logps) == (None, batch.rollout_logps)


def test_ratios_may_compare_with_the_engine() -> None:
    batch = scored()
    compute_logps(context(recipe(train={"epochs": 2, "old_logps": "rollout"})), batch)
    assert batch.old_logps is batch.rollout_logps
    assert batch.trainer_logps is None  # nothing needs them
    compute_logps(context(recipe(train={"old_logps": "rollout"}, rejection=Rejection())), batch)
    assert batch.old_logps is batch.rollout_logps
    assert batch.required("trainer_logps").tolist() == LOGPS


def test_reference_and_critic_are_asked_if_present() -> None:
    asked: list[float] = []

    def logps(tokens: Tensor, mask: Tensor, temperature: float, media: object, candidates: object) -> Tensor:
        asked.append(temperature)
        return -3.0 * mask

    batch = scored()
    made = recipe(temperature=0.5, kl_loss=KLLoss(), critic=Critic(), train={"max_tokens_per_micro_batch": 6})
    compute_logps(
        context(
            made,
            critic=Trained(Values(2.0)),
            reference=SimpleNamespace(logps=logps, passes=PackedPasses(None), applied=nullcontext),
        ),
        batch,
    )
    assert torch.equal(batch.required("ref_logps"), -3.0 * batch.mask)
    assert asked == [0.5, 0.5, 0.5]
    assert batch.required("values").tolist() == [[2 * x for x in row] for row in LOGPS]


def test_the_gap_is_measured_for_known_log_probs() -> None:
    """Rows 0 and 1 are known: gaps 0.5, 0.1 and 0.3 to the engine's -0.5, of which the mean is 0.3."""
    trainer = torch.full((4, 4), torch.nan)
    trainer[0], trainer[1] = torch.tensor([9.0, -1.0, -0.6, 9.0]), torch.tensor([9.0, -0.2, 9.0, 9.0])
    meter = Meter()
    log_mismatch(ready(trainer_logps=trainer), 0, lambda x: x, meter)
    meter.mean("mismatch/mean", 0.9, weight=3)  # as of another rank with three tokens
    metrics = meter.result(LocalRanks())  # type: ignore[arg-type]
    assert metrics["mismatch/mean"] == pytest.approx(0.6)
    assert metrics["mismatch/max"] == pytest.approx(0.5)
    assert all(map(math.isfinite, metrics.values()))


def test_tokens_of_older_weights_are_measured_apart() -> None:
    """Row 0 is of version 2, as the trainer: 0.5 from the engine's -0.5; row 1 is older, its ratio exp(0.3)."""
    trainer = torch.full((4, 4), torch.nan)
    trainer[0], trainer[1] = torch.tensor([9.0, -1.0, -1.0, 9.0]), torch.tensor([9.0, -0.2, 9.0, 9.0])
    versions = torch.tensor([2, 1, 1, 1])[:, None].expand(4, 4)
    meter = Meter()
    log_mismatch(ready(trainer_logps=trainer, versions=versions), 2, lambda x: x, meter)
    metrics = meter.result(LocalRanks())  # type: ignore[arg-type]
    assert metrics["mismatch/max"] == metrics["mismatch/kl"] == pytest.approx(0.5)
    assert metrics["staleness/k3"] == pytest.approx(math.exp(0.3) - 1 - 0.3, rel=1e-5)
    meter = Meter()
    log_mismatch(ready(trainer_logps=trainer, versions=versions), 3, lambda x: x, meter)
    assert set(meter.result(LocalRanks())) == {"staleness/k3"}  # type: ignore[arg-type]


def test_an_unknown_gap_is_no_metric() -> None:
    meter = Meter()
    log_mismatch(ready(), 0, lambda x: x, meter)
    assert not {"mismatch/mean", "mismatch/max"} & set(meter.result(LocalRanks()))  # type: ignore[arg-type]


def test_a_batch_without_rows_has_log_probs_too() -> None:
    batch = collate([])
    compute_logps(context(recipe(train={"epochs": 2})), batch)
    assert batch.required("old_logps").shape == (0, 0)
    batch = collate([replace(example_trajectory("ab"), tokens=[1, 2, 3, 4])])
    compute_logps(context(recipe(train={"epochs": 2})), batch)
    assert batch.required("old_logps").tolist() == [[0, 0, 3, 4]]
