"""Losses of preferences in numbers worked by hand, their gradients, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit.base.errors import RecipeError
from rlkit.interfaces.loss import Inputs, PairLoss
from rlkit.losses import DPO, KTO, ORPO, AdvantageRegression, SimPO
from rlkit.models.actor import Actor
from rlkit.ops.groups import mean_over_pairs, pairs
from rlkit.ops.masked import at_last
from rlkit.testing import check_loss, example_batch
from rlkit.train.objective import Objective
from rlkit.types import Batch, LossOutput, PolicyOutput, TrainBatch
from tests.bench.preferences import ROWS, policies, summary

SMOOTH = [
    DPO(), DPO(label_smoothing=0.1), DPO(0.5, "ipo"), DPO(length_normalized=True), DPO(1.0, "hinge"), SimPO(), ORPO(),
]  # fmt: skip


def softplus(x: float) -> float:
    return math.log1p(math.exp(x))


def rows(
    logps: list[list[float]], rewards: list[float], ref: list[list[float]] | None = None, group: list[int] | None = None
) -> tuple[TrainBatch, Tensor]:
    """Make rows of a prompt of one token and these log-probs, in one group; the reference's are 0 unless set."""
    width = 1 + max(map(len, logps))
    batch = example_batch(rewards, group or [0] * len(rewards))
    attention = torch.arange(width) < 1 + torch.tensor([[len(row)] for row in logps])
    mask, zeros = attention & (torch.arange(width) > 0), torch.zeros(len(logps), width)

    def table(values: list[list[float]]) -> Tensor:
        return torch.tensor([[0.0, *row, *[0.0] * (width - 1 - len(row))] for row in values])

    made = replace(
        batch,
        tokens=zeros.long(),
        attention=attention,
        mask=mask,
        rollout_logps=zeros,
        versions=torch.where(mask, 0, -1),
        token_rewards=zeros,
        old_logps=zeros,
        ref_logps=zeros if ref is None else table(ref),
        advantages=zeros,
    )
    return TrainBatch.of(made), table(logps)


def result(loss: PairLoss, batch: TrainBatch, logps: Tensor) -> LossOutput:
    return loss(PolicyOutput(logps, None), batch)


PAIR = ([[-1.0, -2.0, -0.5], [-0.4, -0.6]], [1.0, 0.0], [[-1.5, -2.5, -1.0], [-0.3, -0.3]])
"""Log-ratios of 0.5 x 3 = 1.5 for the better row, and of -0.1 - 0.3 = -0.4 for the worse; means of 0.5 and -0.2."""


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPO(0.1), softplus(-0.19)),
        (DPO(0.5), softplus(-0.95)),
        (DPO(0.5, label_smoothing=0.2), 0.8 * softplus(-0.95) + 0.2 * softplus(0.95)),
        (DPO(0.5, length_normalized=True), softplus(-0.35)),
        (DPO(0.1, "hinge"), 1 - 0.19),
        (DPO(1.0, "hinge"), 0.0),
        (DPO(0.5, "ipo"), (0.7 - 1 / (2 * 0.5)) ** 2),
        (DPO(0.1, "ipo"), (0.7 - 1 / (2 * 0.1)) ** 2),
        # mean log-probs of -3.5 / 3 and -0.5
        (SimPO(2.0, 1.0), softplus(-(2 * (-3.5 / 3 + 0.5) - 1))),
        (SimPO(3.0, 0.0), softplus(-(3 * (-3.5 / 3 + 0.5)))),
    ],
)
def test_pairs_by_hand(loss: PairLoss, expected: float) -> None:
    batch, logps = rows(*PAIR)
    found = result(loss, batch, logps)
    assert found.per_token.tolist() == [
        [0, 0, 0, pytest.approx(expected, rel=1e-6)],
        [0, 0, pytest.approx(expected, rel=1e-6), 0],
    ]
    assert found.metrics["chosen_logps"] == pytest.approx(-3.5)
    assert found.metrics["rejected_logps"] == pytest.approx(-1.0)


def test_the_margin_is_that_of_implicit_rewards() -> None:
    batch, logps = rows(*PAIR)
    found = result(DPO(0.1), batch, logps).metrics
    assert (found["margin"].item(), found["preference_accuracy"].item()) == (pytest.approx(0.19), 1)
    batch.rewards = batch.rewards.flip(0)
    found = result(DPO(0.1), batch, logps).metrics
    assert (found["margin"].item(), found["preference_accuracy"].item()) == (pytest.approx(-0.19), 0)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (DPO(1.0, length_normalized=True), softplus(1.0)),
        (SimPO(1.0, 0.5), softplus(1.0 + 0.5)),
        (ORPO(0.0), 2.0),
    ],
)
def test_rows_of_one_token_by_hand(loss: PairLoss, expected: float) -> None:
    batch, logps = rows([[-2.0], [-1.0]], [1.0, 0.0])
    assert result(loss, batch, logps).per_token.sum(-1).tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize("coef", [0.0, 0.1, 1.0])
def test_orpo_by_hand(coef: float) -> None:
    """The better row has p = e^(-3.5 / 3), the worse one e^-0.5."""
    batch, logps = rows(*PAIR)
    better, worse = math.exp(-3.5 / 3), math.exp(-0.5)
    odds = math.log(better / (1 - better)) - math.log(worse / (1 - worse))
    found = result(ORPO(coef), batch, logps)
    assert found.per_token.sum(-1).tolist() == pytest.approx([3.5 / 3 + coef * softplus(-odds)] * 2)
    assert found.metrics["margin"] == pytest.approx(odds)


def test_a_certain_row_has_finite_odds() -> None:
    batch, logps = rows([[0.0, 0.0], [-1.0]], [0.0, 1.0])
    found = result(ORPO(), batch, logps).per_token.sum(-1)
    assert found.tolist() == pytest.approx(
        [1 + 0.1 * (math.log(1e6) + math.log((1 - math.exp(-1)) / math.exp(-1)))] * 2
    )


def test_all_pairs_of_a_group_are_averaged() -> None:
    """Of rewards 2, 1, 1 and scores 0.3, 0.1, 0.5: margins 0.2 and -0.2. Of the group of one row nothing is known."""
    batch, logps = rows(
        [[-3.0], [-5.0], [-1.0], [-2.0], [-9.0], [-4.0]], [2.0, 1.0, 1.0, 3.0, 3.0, 0.0], group=[5, 5, 5, 2, 2, 7]
    )
    loss = DPO(0.1)
    found = result(loss, batch, logps)
    expected = (softplus(-0.2) + softplus(0.2)) / 2
    assert found.per_token.sum(-1).tolist() == [*[pytest.approx(expected)] * 3, 0, 0, 0]
    assert loss.usable_rows(batch).tolist() == [True, True, True, False, False, False]
    metrics = {name: value.item() for name, value in found.metrics.items()}
    assert metrics == {
        "margin": pytest.approx(0, abs=1e-7),
        "preference_accuracy": 0.5,
        "chosen_logps": -3,
        "rejected_logps": -3,
    }
    alone, logps = rows([[-3.0], [-5.0]], [1.0, 1.0])
    nothing = result(loss, alone, logps.requires_grad_())
    assert (nothing.per_token.tolist(), nothing.metrics) == ([[0, 0], [0, 0]], {})


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=12))
def test_pairs_are_all_of_a_group_with_unequal_rewards(table: list[tuple[int, int]]) -> None:
    group, rewards = torch.tensor([g for g, _ in table]), torch.tensor([float(r) for _, r in table])
    found = pairs(rewards, group)
    expected = [(i, j) for i, (g, r) in enumerate(table) for j, (h, s) in enumerate(table) if g == h and r > s]
    assert sorted(zip(found.better.tolist(), found.worse.tolist(), strict=True)) == expected
    values = torch.arange(len(expected)).double() + 1
    means = mean_over_pairs(values, found, group)
    for row, (g, _) in enumerate(table):
        mine = [v for v, i in zip(values.tolist(), found.better.tolist(), strict=True) if table[i][0] == g]
        assert means[row].item() == pytest.approx(sum(mine) / max(len(mine), 1))


def test_the_last_column_under_a_mask_that_has_gaps() -> None:
    mask = torch.tensor([[True, False, True, False], [False] * 4, [False, False, False, True]])
    found = at_last(torch.tensor([1.0, 2.0, 3.0]), mask)
    assert found.tolist() == [[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 3]]


@pytest.mark.parametrize("loss", SMOOTH, ids=lambda loss: loss.explain())
def test_gradients_equal_finite_differences(loss: PairLoss) -> None:
    batch, logps = rows(
        [[-1.0, -2.0], [-0.4], [-0.7, -0.2, -1.1], [-2.0, -0.1]], [1.0, 0.0, 0.0, 2.0], group=[0, 0, 1, 1]
    )
    batch.ref_logps = (logps - 0.1 * torch.arange(4)[:, None]).double() * batch.mask

    def total(x: Tensor) -> Tensor:
        return result(loss, batch, x).per_token.sum()

    assert torch.autograd.gradcheck(total, logps.double().requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [*SMOOTH, DPO(kind="hinge")], ids=lambda loss: loss.explain())
def test_losses_of_pairs_keep_the_contract(loss: PairLoss) -> None:
    check_loss(loss)
    assert loss.aggregation == "seq_mean_token_sum"
    assert Inputs.GROUPS in loss.inputs
    assert (Inputs.REFERENCE in loss.inputs) is isinstance(loss, DPO)


def kto(loss: KTO, batch: TrainBatch, logps: Tensor) -> LossOutput:
    assert not loss.select(logps.detach(), batch).any()
    return loss(PolicyOutput(logps, None), batch)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_kto_by_hand() -> None:
    """Log-ratios of 1.5 and -0.4 have a mean of 0.55; of -1.5 and 0.4 it is below 0, and the baseline 0."""
    batch, logps = rows(*PAIR)
    found = kto(KTO(0.5), batch, logps)
    assert found.per_token.sum(-1).tolist() == pytest.approx([1 - sigmoid(0.475), 1 - sigmoid(0.475)])
    metrics = {name: value.item() for name, value in found.metrics.items()}
    assert metrics == {"margin": pytest.approx(0.475), "preference_accuracy": 1, "baseline": pytest.approx(0.55)}
    weighed = KTO(0.5, threshold=1.0, desirable_weight=3.0, undesirable_weight=2.0)  # no row is above 1
    found = kto(weighed, batch, logps)
    assert found.per_token.tolist() == [
        [0, 0, 0, pytest.approx(2 * (1 - sigmoid(-0.475)))],
        [0, 0, pytest.approx(2 * (1 - sigmoid(0.475))), 0],
    ]
    assert found.metrics["preference_accuracy"] == 0.5
    weighed.threshold = 0.5
    assert kto(weighed, batch, logps).per_token.sum(-1).tolist() == pytest.approx(
        [3 * (1 - sigmoid(0.475)), 2 * (1 - sigmoid(0.475))]
    )
    batch.ref_logps, logps = logps, batch.required("ref_logps")
    found = kto(KTO(0.5), batch, logps)
    assert found.metrics["baseline"] == 0
    assert found.per_token.sum(-1).tolist() == pytest.approx([1 - sigmoid(-0.75), 1 - sigmoid(-0.2)])


def test_kto_at_the_baseline_and_a_row_without_tokens() -> None:
    batch, logps = rows([[-1.0, -1.0], [-2.0], [-9.0]], [1.0, 0.0, 1.0])
    batch.mask[2] = False
    batch.ref_logps = logps - 0.5 * batch.mask / batch.mask.sum(-1, keepdim=True).clamp(min=1)
    found = kto(KTO(), batch, logps)
    assert found.per_token.sum(-1).tolist() == [0.5, 0.5, 0]  # d is 0.5 in both, and so is z
    assert (found.metrics["baseline"], found.metrics["preference_accuracy"]) == (0.5, 0)


def test_ktos_baseline_is_of_all_ranks_and_has_no_gradient() -> None:
    batch, logps = rows(*PAIR)
    loss = KTO(1.0)
    loss.reduce = lambda x: x + torch.tensor([4.9, 4.0])  # type: ignore[method-assign]
    (gradient,) = torch.autograd.grad(kto(loss, batch, logps.requires_grad_()).per_token.sum(), logps)
    slopes = [sigmoid(x) * (1 - sigmoid(x)) for x in (0.5, 1.4)]  # from a baseline of 6 / 6
    expected = [[0.0, *[-slopes[0]] * 3], [0, slopes[1], slopes[1], 0]]
    torch.testing.assert_close(gradient, torch.tensor(expected))
    nothing = batch.rows(torch.arange(0))
    loss.reduce = lambda x: x  # type: ignore[method-assign]
    kto(loss, nothing, logps[:0, :0])
    assert loss._baseline == 0


def test_kto_keeps_the_contract_and_needs_no_groups() -> None:
    check_loss(KTO())
    assert KTO.inputs == Inputs.REWARDS | Inputs.REFERENCE
    assert KTO().explain().startswith("1.0 (1 - sigmoid(0.1 (d - z))) if R > 0.0 else 1.0 (1 - sigmoid(0.1 (z - d)))")


TRL: list[tuple[DPO, list[float]]] = [
    (DPO(0.1), [0.6329175, 4.4585198, -2.7157915, 4.6738512, 4.160335, -0.4076761]),
    (DPO(2.0), [2.4582942, 143.994803, -40.8335631, 66.2948707, 23.0282511, 50.9593716]),
    (DPO(1.0, length_normalized=True), [0.6144913, 20.1582388, 8.1271216, -8.7948018, 8.1494741, 10.699875]),
    (DPO(0.5, "ipo"), [3.0116816, 114.5511198, 107.9625384, -43.3874109, 83.5342661, 36.8401678]),
    (DPO(0.5, "hinge"), [1.1136537, 36.2643438, -10.283519, 16.6956679, 5.7991136, 12.8340414]),
]
"""What `python -m tests.bench.preferences` prints of TRL 1.16: loss, norm of the gradient, products with directions."""


@pytest.mark.parametrize(("loss", "expected"), TRL, ids=[loss.explain() for loss, _ in TRL])
def test_losses_and_gradients_equal_those_of_trl(loss: DPO, expected: list[float]) -> None:
    """Of the same batch and models, through packed passes and what a run divides by."""
    policy, reference = policies()
    actor, length = Actor(policy), max(len(prompt + answer) for prompt, answer in ROWS)
    ends = torch.tensor([[len(prompt), len(prompt + answer)] for prompt, answer in ROWS])
    columns = torch.arange(length)
    attention, mask = columns < ends[:, 1:], (columns >= ends[:, :1]) & (columns < ends[:, 1:])
    zeros = torch.zeros(len(ROWS), length)
    batch = TrainBatch.of(
        Batch(
            tokens=torch.tensor([prompt + answer + [0] * (length - len(prompt + answer)) for prompt, answer in ROWS]),
            attention=attention,
            mask=mask,
            rollout_logps=zeros,
            group=torch.tensor([0, 0, 1, 1]),
            versions=torch.where(mask, 0, -1),
            token_rewards=zeros,
            rewards=torch.tensor([1.0, 0.0, 1.0, 0.0]),
            components=zeros[:, :0],
            advantages=zeros,
        )
    )
    batch.ref_logps = Actor(reference)(batch.tokens, mask).logps.detach()
    objective = Objective(loss, loss.aggregation, 1)
    counts = objective.count_over_ranks(batch, [0, 1, 2, 3], 2, lambda x: x)
    assert actor.passes.packed
    share = objective.share(actor(batch.tokens, mask), batch, counts)
    share.loss.backward()  # type: ignore[no-untyped-call]
    assert share.loss.item() == pytest.approx(expected[0], rel=1e-5)
    norm = expected[1]  # which a product with a direction has about
    assert summary(policy) == pytest.approx(expected[1:], rel=0, abs=1e-5 * norm)


def test_label_smoothing_is_of_the_sigmoid_alone() -> None:
    with pytest.raises(RecipeError, match="label_smoothing=0.1 with kind='ipo', expected kind='sigmoid'"):
        DPO(kind="ipo", label_smoothing=0.1)


def test_objectives_are_explained() -> None:
    assert DPO().explain() == "-log sigmoid(0.1 (d_better - d_worse)), d = sum_t(logp - ref_logp)"
    assert DPO(0.2, "ipo").explain() == "((d_better - d_worse) - 1 / (2 0.2))^2, d = mean_t(logp - ref_logp)"
    assert (
        DPO(0.2, label_smoothing=0.1).explain().startswith("0.9 of -log sigmoid(0.2 (d_better - d_worse)) + 0.1 of it")
    )


def test_advantage_regression_by_hand() -> None:
    """(0.5 d - A)^2 with d = 1.5 and -0.4, A = 1 and -0.5: 0.0625 and 0.09; the gradient is 2 beta (beta d - A)."""
    batch, logps = rows(*PAIR)
    batch.advantages = torch.tensor([1.0, -0.5])[:, None] * batch.mask
    logps.requires_grad_()
    output = AdvantageRegression(0.5)(PolicyOutput(logps, None), batch)
    assert output.per_token.sum(-1).tolist() == pytest.approx([0.0625, 0.09])
    assert output.metrics["log_ratio"].item() == pytest.approx(0.55)
    (gradient,) = torch.autograd.grad(output.per_token.sum(), logps)
    assert torch.allclose(gradient, torch.tensor([-0.25, 0.3])[:, None] * batch.mask)
    check_loss(AdvantageRegression())
