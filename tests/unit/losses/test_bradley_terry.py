"""The loss of reward models in numbers worked by hand, its gradient, and what holds for any division of its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlkit.losses import BradleyTerry
from rlkit.ops.aggregate import weights
from rlkit.testing import check_loss
from rlkit.train.objective import Objective
from rlkit.types import LossOutput, PolicyOutput, TrainBatch
from tests.unit.losses.test_preference_losses import rows as answers
from tests.unit.losses.test_preference_losses import softplus

LOSSES = [BradleyTerry(), BradleyTerry(margin=0.5), BradleyTerry(margin=1.0, centre=0.01)]


def rows(rewards: list[float], group: list[int]) -> TrainBatch:
    """Make rows of a prompt of one token and answers of one token more than the row's number."""
    return answers([[0.0] * (1 + i) for i in range(len(rewards))], rewards, group=group)[0]


def result(loss: BradleyTerry, batch: TrainBatch, scores: Tensor) -> LossOutput:
    """Return the loss where a row has this score [B] at its last token, and others before it."""
    before = torch.linspace(-3, 3, batch.mask.numel()).view_as(batch.mask)
    last = batch.mask & (batch.mask.flip(-1).cumsum(-1).flip(-1) == 1)
    table = torch.where(last, scores[:, None].to(before), before) * batch.mask
    return loss(PolicyOutput(torch.zeros_like(table), None, scores=table), batch)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (BradleyTerry(), softplus(-0.8)),
        (BradleyTerry(margin=0.5), softplus(-(0.8 - 0.5 * 2))),
        (BradleyTerry(centre=0.1), softplus(-0.8) + 0.1 * 1.6**2),
        (BradleyTerry(margin=1.0, centre=1.0), softplus(-(0.8 - 2)) + 1.6**2),
    ],
)
def test_a_pair_by_hand(loss: BradleyTerry, expected: float) -> None:
    """Scores of 1.2 and 0.4 at the last tokens of answers with the rewards 3 and 1."""
    found = result(loss, rows([3.0, 1.0], [0, 0]), torch.tensor([1.2, 0.4]))
    assert found.per_token.tolist() == [[0, pytest.approx(expected), 0], [0, 0, pytest.approx(expected)]]
    metrics = {name: value.item() for name, value in found.metrics.items()}
    assert metrics == {"margin": pytest.approx(0.8), "preference_accuracy": 1, "score": pytest.approx(0.8)}
    wrong = result(loss, rows([1.0, 3.0], [0, 0]), torch.tensor([1.2, 0.4])).metrics
    assert (wrong["margin"].item(), wrong["preference_accuracy"].item()) == (pytest.approx(-0.8), 0)


def test_all_pairs_of_a_group_are_averaged() -> None:
    """Rewards of 2, 1, 1: two pairs. The next group has equal rewards, the last one row."""
    batch = rows([2.0, 1.0, 1.0, 5.0, 5.0, 0.0], [4, 4, 4, 1, 1, 7])
    scores = torch.tensor([0.3, 0.1, 0.7, 9.0, -9.0, 2.0])
    found = result(BradleyTerry(), batch, scores)
    expected = (softplus(-0.2) + softplus(0.4)) / 2
    assert found.per_token.sum(-1).tolist() == [*[pytest.approx(expected)] * 3, 0, 0, 0]
    assert found.metrics["margin"].item() == pytest.approx((0.2 - 0.4) / 2)
    assert found.metrics["preference_accuracy"].item() == 0.5
    assert found.metrics["score"].item() == pytest.approx((0.3 + 0.1 + 0.7) / 3)
    alone = result(BradleyTerry(), rows([1.0, 1.0], [0, 0]), torch.tensor([1.0, 2.0]))
    assert (alone.per_token.any().item(), alone.metrics) == (False, {})


def test_the_loss_is_the_mean_over_groups_with_a_pair() -> None:
    batch = rows([2.0, 1.0, 1.0, 5.0, 5.0, 0.0, 1.0], [4, 4, 4, 1, 1, 7, 7])
    scores = torch.tensor([0.3, 0.1, 0.7, 9.0, -9.0, 2.0, 0.5], requires_grad=True)
    objective = Objective(BradleyTerry(), "seq_mean_token_sum", 1)
    counts = objective.count_over_ranks(batch, list(range(7)), 8, lambda x: x)
    assert counts.sequences == 5
    found = []
    for division in ([[0, 1, 2, 3, 4, 5, 6]], [[6, 5], [3, 4], [2, 1, 0]]):
        loss = torch.zeros(())
        for micro in division:
            part = batch.rows(torch.tensor(micro))
            table = scores[micro][:, None] * part.mask
            loss = loss + objective.share(PolicyOutput(0 * table, None, scores=table), part, counts).loss
        found.append((loss.item(), torch.autograd.grad(loss, scores)[0]))
    # three rows of (softplus(-0.2) + softplus(0.4)) / 2, two of softplus(1.5): each row counts
    expected = (3 * (softplus(-0.2) + softplus(0.4)) / 2 + 2 * softplus(1.5)) / 5
    assert found[0][0] == pytest.approx(expected)
    assert found[1][0] == pytest.approx(expected)
    torch.testing.assert_close(found[0][1], found[1][1])


CHOSEN, REJECTED, MARGINS = [0.7, -1.3, 2.5], [0.2, 0.4, -0.6], [0.5, 1.0, 3.0]
TRL = [
    (False, 0.0, 0.795309, [-0.1258469, -0.2818449, -0.0143691, 0.1258469, 0.2818449, 0.0143691]),
    (False, 0.01, 0.8127424, [-0.1198469, -0.2878449, -0.0017024, 0.1318469, 0.2758449, 0.0270358]),
    (True, 0.0, 1.367529, [-0.1666667, -0.3123422, -0.1583403, 0.1666667, 0.3123422, 0.1583403]),
    (True, 0.01, 1.3849623, [-0.1606667, -0.3183422, -0.1456736, 0.1726667, 0.3063422, 0.1710069]),
]
"""Whether there are margins, the coefficient of centring, and the loss of three pairs in TRL 1.16, with its gradient by
the scores of the chosen and the rejected answers; printed by `python -m tests.bench.reward_loss`."""


@pytest.mark.parametrize(("margins", "centre", "loss", "gradient"), TRL)
def test_the_loss_is_that_of_trl(margins: bool, centre: float, loss: float, gradient: list[float]) -> None:
    """A pair's margin in TRL is the difference of its rewards here."""
    scores = torch.tensor([*CHOSEN, *REJECTED], requires_grad=True)
    batch = rows([*MARGINS, 0.0, 0.0, 0.0], [0, 1, 2, 0, 1, 2])
    table = scores[:, None] * batch.mask
    objective = Objective(BradleyTerry(float(margins), centre), "seq_mean_token_sum", 1)
    counts = objective.count_over_ranks(batch, list(range(6)), 8, lambda x: x)
    found = objective.share(PolicyOutput(0 * table, None, scores=table), batch, counts).loss
    assert found.item() == pytest.approx(loss, abs=1e-5)
    assert torch.autograd.grad(found, scores)[0].tolist() == pytest.approx(gradient, abs=1e-5)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.explain())
def test_the_gradient_equals_finite_differences(loss: BradleyTerry) -> None:
    batch = rows([2.0, 1.0, 1.0, 5.0], [4, 4, 4, 1])
    scores = torch.tensor([0.3, 0.1, 0.7, 9.0], dtype=torch.double, requires_grad=True)

    def total(x: Tensor) -> Tensor:
        table = x[:, None] * weights(batch.mask, "token_sum").double()
        return loss(PolicyOutput(0 * table, None, scores=table), batch).per_token.sum()

    assert torch.autograd.gradcheck(total, scores)
    check_loss(loss)


def test_the_objective_is_explained() -> None:
    assert BradleyTerry(0.5, 0.01).explain() == (
        "-log sigmoid(s_better - s_worse - 0.5 (r_better - r_worse)) + 0.01 (s_better + s_worse)^2"
    )
