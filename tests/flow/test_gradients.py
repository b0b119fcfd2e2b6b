"""The gradient of a mini-batch is the same however its rows are divided: into micro-batches, and over ranks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlkit.ops.aggregate import Aggregation
from rlkit.train.setup import TrainContext
from tests.conftest import ROOT
from tests.flow import ddp_gradients
from tests.flow.ddp_gradients import LENGTHS, gradient, make_run

ROWS = list(range(len(LENGTHS)))
OTHERS = ["DPO", "CrossEntropy", "Distillation"]


@pytest.fixture(scope="module")
def run() -> Iterator[TrainContext]:
    live = make_run(1)
    yield live
    live.service.close()


def assert_same(one: torch.Tensor, other: torch.Tensor) -> None:
    assert one.norm() > 1e-3
    assert (one - other).norm() / one.norm() < 1e-5


MODES = st.sampled_from(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"])


@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(ROWS), budget=st.integers(1, 300), mode=MODES)
def test_any_split_into_micro_batches_gives_the_same_gradient(
    run: TrainContext, order: list[int], budget: int, mode: Aggregation
) -> None:
    run.recipe.train = replace(run.recipe.train, aggregation=mode)
    run.data.token_limit = 100_000
    expected = gradient(run, ROWS)
    run.data.token_limit = budget
    assert_same(expected, gradient(run, order))
    run.data.token_limit = 100_000


def test_the_gradient_is_that_of_the_loss_written_out(run: TrainContext) -> None:
    """An independent few lines: full logits, the published formulae, one division by the count of tokens."""
    batch = ddp_gradients.example(ROWS)
    assert batch.old_logps is not None
    assert batch.ref_logps is not None
    policy = run.models.actor.policy
    logps = torch.log_softmax(policy(input_ids=batch.tokens).logits[:, :-1], -1)
    chosen = logps.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    mask, old, ref = batch.mask[:, 1:], batch.old_logps[:, 1:], batch.ref_logps[:, 1:]
    ratio = (chosen - old).exp()
    advantages = batch.advantages[:, 1:]
    clip = -torch.minimum(advantages * ratio, advantages * ratio.clamp(0.8, 1.2))
    k3 = (ref - chosen).exp() - (ref - chosen) - 1
    entropy = -(logps.exp() * logps).sum(-1)
    loss = ((clip + 0.1 * k3.clamp(max=10) - 0.01 * entropy) * mask).sum() / mask.sum()
    plain = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(policy.parameters()))])
    run.recipe.train = replace(run.recipe.train, aggregation=None)
    assert_same(plain, gradient(run, ROWS))


@pytest.mark.slow
@settings(deadline=None, max_examples=5, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(ROWS), budget=st.integers(1, 300))
@pytest.mark.parametrize("loss", OTHERS)
def test_any_split_gives_the_same_gradient_of_other_losses(
    run: TrainContext, loss: str, order: list[int], budget: int
) -> None:
    """Of whole groups for DPO; with the same noise on the embeddings for CrossEntropy."""
    run.recipe.train = replace(run.recipe.train, aggregation=None)
    run.data.token_limit = 100_000
    expected = gradient(run, ROWS, loss)
    run.data.token_limit = budget
    assert_same(expected, gradient(run, order, loss))
    run.data.token_limit = 100_000


def of_two_ranks(losses: str, divisions: list[list[int]], out: Path) -> list[torch.Tensor]:
    """Return the gradient of each loss for each division of rows over ranks."""
    arguments = [",".join(map(str, division)) for division in divisions]
    done = subprocess.run(
        (sys.executable, str(Path(__file__).with_name("ddp_gradients.py")), "2", str(out), losses, *arguments),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(out)  # type: ignore[no-any-return]


@pytest.mark.slow
def test_any_division_over_two_ranks_gives_the_same_gradient(run: TrainContext, tmp_path: Path) -> None:
    rng = random.Random(0)
    divisions = [[0] * 8, [1] * 8, [0] + [1] * 7, *([rng.randint(0, 1) for _ in ROWS] for _ in range(5))]
    run.recipe.train = replace(run.recipe.train, aggregation=None)
    expected = gradient(run, ROWS)
    for found in of_two_ranks("ClipLoss", divisions, tmp_path / "g.pt"):
        assert_same(expected, found)


@pytest.mark.slow
def test_any_division_of_groups_has_the_same_gradient(run: TrainContext, tmp_path: Path) -> None:
    """One rank has no group, or only the one without a pair, which the other ranks' counts must not notice."""
    groups = [[0, 0, 0, 0], [1, 1, 0, 1], [0, 0, 1, 0], [0, 1, 1, 0], [0, 1, 0, 1]]
    run.recipe.train = replace(run.recipe.train, aggregation=None)
    expected = [gradient(run, ROWS, loss) for loss in OTHERS]
    divisions = [[rank for rank in ranks for _ in (0, 1)] for ranks in groups]
    for i, found in enumerate(of_two_ranks(",".join(OTHERS), divisions, tmp_path / "g.pt")):
        assert_same(expected[i % len(OTHERS)], found)
