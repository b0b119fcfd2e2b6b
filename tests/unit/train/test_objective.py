"""The loss of a micro-batch, by hand: what counts, what it is divided by, and which terms are added."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit.base.errors import PartError
from rlkit.interfaces.loss import Inputs, PolicyLoss
from rlkit.losses import ClipLoss, PolicyGradient
from rlkit.ops.aggregate import Aggregation
from rlkit.recipe import Correction, KLLoss, Rejection
from rlkit.train.objective import Counts, LogLinear, LossShare, Objective, count_tokens, value_share
from rlkit.types import LossOutput, PolicyOutput, TrainBatch
from tests.unit.phases import ready, recipe

COUNTS = Counts(torch.tensor(8.0), torch.tensor(4.0))
"""Eight tokens: 2, 1, 3 and 2; four sequences."""


class Ones(PolicyLoss):
    """A loss of 1 at each token, also outside the mask, with a metric."""

    aggregation = "token_sum"

    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        return LossOutput(torch.ones_like(out.logps) + 0 * out.logps, {"metric": out.logps.detach().sum()})


class Weighted(Ones):
    """The same, which weighs by itself."""

    inputs = Ones.inputs | Inputs.CORRECTION


def out(batch: TrainBatch) -> PolicyOutput:
    logps = (-1.0 * batch.mask).requires_grad_()
    return PolicyOutput(logps, 0.5 * batch.mask)


def share(batch: TrainBatch, aggregation: Aggregation = "token_mean", **options: object) -> LossShare:
    objective = replace(Objective(Ones(), aggregation, budget=10), **options)  # type: ignore[arg-type]
    return objective.share(out(batch), batch, COUNTS)


def test_tokens_and_sequences_are_counted_over_all_ranks() -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [False, True, False]])
    assert count_tokens(mask, lambda x: x) == (3, 2, None)
    assert count_tokens(mask, lambda x: 10 * x) == (30, 20, None)
    assert count_tokens(mask[:0], lambda x: x) == (0, 0, None)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("token_mean", 8 / 8),
        ("token_sum", 8.0),
        ("seq_mean_token_mean", 4 / 4),
        ("seq_mean_token_sum", 8 / 4),
        ("seq_mean_token_sum_norm", 8 / 4 / 10),
    ],
)
def test_aggregations_divide_by_the_mini_batchs_counts(aggregation: Aggregation, expected: float) -> None:
    assert share(ready(), aggregation).loss.item() == pytest.approx(expected)
    half = ready().rows(torch.tensor([0, 1]))
    assert share(half, "token_mean").loss.item() == pytest.approx(3 / 8)  # of 2 + 1 tokens: a share, no mean


def test_rejected_tokens_count_if_the_recipe_says_so() -> None:
    """Row 2 is rejected, its three tokens with it; the mean over tokens of a sequence shows the denominator."""
    accepted = ready().mask.clone()
    accepted[2] = False
    accepted[0, 1] = False  # one of two tokens of row 0
    batch = ready(accepted=accepted)
    assert share(batch, "token_sum").loss.item() == 4
    assert share(batch, "seq_mean_token_mean").loss.item() == pytest.approx((1 + 1 + 0 + 1) / 4)
    kept = share(batch, "seq_mean_token_mean", keep_in_denominator=True)
    assert kept.loss.item() == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    everything = Objective(Ones(), "token_mean", 1, keep_in_denominator=True)
    assert torch.equal(everything.denominator(batch), batch.mask)
    assert torch.equal(Objective(Ones(), "token_mean", 1).denominator(batch), batch.accepted)


def test_correction_weights_multiply_the_loss_but_no_other_term() -> None:
    weights = 3.0 * ready().mask
    batch = ready(correction_weights=weights, ref_logps=-1.0 * ready().mask)
    assert share(batch).loss.item() == pytest.approx(3)
    assert share(batch, loss=Weighted()).loss.item() == pytest.approx(1)
    assert share(batch, entropy_coef=0.1).loss.item() == pytest.approx(3 - 0.1 * 0.5)


def test_entropy_is_maximised_and_divergence_minimised() -> None:
    # k1 = logp - ref = -1 + 3 = 2 at each token
    batch = ready(ref_logps=-3.0 * ready().mask)
    found = share(batch, entropy_coef=0.2, kl=KLLoss(coef=0.25, estimator="k1"))
    assert found.loss.item() == pytest.approx(1 - 0.2 * 0.5 + 0.25 * 2)
    assert found.metrics["entropy"].item() == pytest.approx(0.5)
    assert found.metrics["kl_ref"].item() == pytest.approx(2)
    assert found.metrics["metric"].item() == pytest.approx(-8)
    assert not any(metric.requires_grad for metric in found.metrics.values())
    assert found.loss.requires_grad


def test_a_weighted_divergence_counts_ratio_and_correction() -> None:
    # k1 = -1 + 3 = 2, pi / pi_old = exp(-1 + 1.5), and a correction of 3 weighs loss and divergence
    mask = ready().mask
    batch = ready(ref_logps=-3.0 * mask, old_logps=-1.5 * mask)
    section = KLLoss(coef=0.25, estimator="k1", importance_weighted=True)
    assert share(batch, kl=section).loss.item() == pytest.approx(1 + 0.25 * 2 * math.exp(0.5))
    corrected = replace(batch, correction_weights=3.0 * mask)
    found = share(corrected, kl=section)
    assert found.loss.item() == pytest.approx(3 + 3 * 0.25 * 2 * math.exp(0.5))
    assert found.metrics["kl_ref"].item() == pytest.approx(3 * 2 * math.exp(0.5))


def test_a_policy_without_entropy_has_no_metric_of_it() -> None:
    batch = ready()
    plain = Objective(Ones(), "token_mean", 1, entropy_coef=0.2).share(out(batch)._replace(entropy=None), batch, COUNTS)
    assert plain.loss.item() == pytest.approx(1)
    assert set(plain.metrics) == {"metric"}


def test_far_sequences_are_excluded_from_the_policy_loss_only() -> None:
    """The policy is 0.5 below the engine everywhere; rows 1 and 3, with 1 and 2 of 8 tokens, are worse than others."""
    batch = ready(ref_logps=-2.0 * ready().mask)  # abs: |-1 + 2| at each token
    found = share(batch, off_policy_threshold=0.4, kl=KLLoss(coef=10.0, estimator="abs"))
    assert found.loss.item() == pytest.approx((8 - 3) / 8 + 10)
    assert found.metrics["off_policy_masked"].item() == pytest.approx(3 / 8)
    assert share(batch, off_policy_threshold=0.5).loss.item() == pytest.approx(1)  # at the threshold: kept


def test_what_is_left_out_has_no_gradient() -> None:
    batch = ready()
    logps = (-1.0 * batch.mask).requires_grad_()
    objective = Objective(PolicyGradient(), "token_sum", 10, off_policy_threshold=0.4)
    objective.share(PolicyOutput(logps, None), batch, COUNTS).loss.backward()  # type: ignore[no-untyped-call]
    assert logps.grad is not None
    assert logps.grad.tolist() == [[0, -1, -1, 0], [0] * 4, [0, -2, -2, -2], [0] * 4]


@pytest.mark.parametrize(("version", "old"), [(0, -0.5), (1, -0.75), (3, -0.875)])
def test_log_linear_old_log_probs_and_weights_by_hand(version: int, old: float) -> None:
    """Log-probs of -1 and -0.5 (engine): tokens of version 0 have old ones of -1 + 0.5 / d, with d = version + 1."""
    batch = ready()
    made = replace(Objective(Ones(), "token_mean", 10), loglinear=LogLinear(version, Correction(high=9.0)))
    seen = made.with_old_logps(out(batch).logps, batch)
    assert seen.old_logps[batch.mask].tolist() == pytest.approx([old] * 8)
    found = made.share(out(batch), batch, COUNTS)
    assert found.loss.item() == pytest.approx(math.exp(old + 0.5))
    assert found.metrics["correction_weight"].item() == pytest.approx(math.exp(old + 0.5))
    assert replace(made, loglinear=LogLinear(version)).share(out(batch), batch, COUNTS).loss.item() == pytest.approx(1)
    assert batch.old_logps.isnan().all()  # the batch is as it was


@given(version=st.integers(0, 20), logp=st.floats(-3, 0))
def test_without_a_bound_the_staleness_cancels(version: int, logp: float) -> None:
    """The weight times the ratio is (pi_old / pi_engine) (pi / pi_old) = pi / pi_engine, and so is the gradient's."""
    batch, loose = ready(), ClipLoss(1.0, 1e9)
    logps = (logp * batch.mask).requires_grad_()
    made = replace(Objective(loose, "token_sum", 10), loglinear=LogLinear(version, Correction(high=1e9)))
    loss = made.share(PolicyOutput(logps, None), batch, COUNTS).loss
    ratio = math.exp(logp + 0.5)
    assert loss.item() == pytest.approx(-ratio * float(batch.advantages.sum()), abs=1e-4)
    loss.backward()  # type: ignore[no-untyped-call]
    assert logps.grad is not None
    torch.testing.assert_close(logps.grad, -ratio * batch.advantages)


def test_each_prompt_counts_alike_however_long_its_answers_are() -> None:
    """Advantages 1 (2 tokens), -1 (1) and 2 (3), -2 (2) of two prompts: (2 - 1) / 3 and (6 - 4) / 5, halved."""
    batch, objective = ready(), Objective(PolicyGradient(), "prompt_mean_token_mean", 10)
    counts = objective.count_over_ranks(batch, [0, 1, 2, 3], 3, lambda x: x)
    assert counts.of_prompt is not None
    assert counts.of_prompt.tolist() == [3, 5, 0]
    expected = (1 / 3 + 2 / 5) / 2
    assert objective.share(out(batch), batch, counts).loss.item() == pytest.approx(expected)
    parts = [batch.rows(torch.tensor(rows, dtype=torch.long)) for rows in ([3, 0], [], [1], [2])]
    assert sum(objective.share(out(x), x, counts).loss.item() for x in parts) == pytest.approx(expected)
    first = objective.count_over_ranks(batch, [0, 1], 3, lambda x: x)  # a mini-batch of the first prompt alone
    one = batch.rows(torch.tensor([0, 1]))
    assert objective.share(out(one), one, first).loss.item() == pytest.approx(1 / 3)
    assert first.of_prompt is not None
    assert first.of_prompt.tolist() == [3, 0, 0]


def test_a_prompts_tokens_count_over_all_ranks() -> None:
    """Row 2 is rejected; on a second rank are as many: of 6 and 4 tokens 2 + 1 and 2 are here."""
    batch = ready()
    batch.accepted = batch.mask & torch.tensor([True, True, False, True])[:, None]
    objective = Objective(PolicyGradient(), "prompt_mean_token_mean", 10)
    counts = objective.count_over_ranks(batch, [0, 1, 2, 3], 2, lambda x: 2 * x)
    assert counts.of_prompt is not None
    assert (counts.tokens.item(), counts.of_prompt.tolist()) == (10, [6, 4])
    assert objective.share(out(batch), batch, counts).loss.item() == pytest.approx((1 / 6 - 4 / 4) / 2)
    kept = replace(objective, keep_in_denominator=True).count_over_ranks(batch, [0, 1, 2, 3], 2, lambda x: x)
    assert kept.of_prompt is not None
    assert kept.of_prompt.tolist() == [3, 5]


def test_a_divergence_without_a_reference_names_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"batch.ref_logps is not computed in this run; the recipe needs a `kl_loss:`"):
        share(ready(), kl=KLLoss())


@pytest.mark.parametrize("broken", ["old_logps", "advantages", None])
def test_only_the_loss_at_fault_is_blamed_for_nan(broken: str | None) -> None:
    class Infinite(Ones):
        def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
            return LossOutput(torch.where(batch.mask, torch.inf, 0.0), {})

    def call(batch: TrainBatch, strict: bool) -> Tensor:
        return Objective(Infinite(), "token_mean", 1, strict=strict).share(out(batch), batch, COUNTS).loss

    batch = ready(old_logps=-1.0 * ready().mask)
    assert call(batch, strict=False) == torch.inf
    if broken is None:
        with pytest.raises(PartError, match="returned a loss that is not finite"):
            call(batch, strict=True)
    else:
        assert call(replace(batch, **{broken: batch.mask / 0.0}), strict=True) == torch.inf


def test_the_objective_is_the_recipes() -> None:
    plain = recipe()
    assert Objective.of(plain) == Objective(plain.loss, "token_mean", 8)
    train = {"aggregation": "token_sum", "entropy_coef": 0.5}
    made = recipe(train=train, kl_loss=KLLoss(), rejection=Rejection(keep_in_denominator=True))
    assert Objective.of(made, strict=True) == Objective(made.loss, "token_sum", 8, 0.5, made.kl_loss, True, True)
    assert Objective.of(replace(made, rejection=Rejection())).keep_in_denominator is False
    assert isinstance(made.loss, PolicyGradient)
    stale = recipe(train={"old_logps": "loglinear", "off_policy_mask_threshold": 0.1}, correction=Correction())
    expected = Objective(
        stale.loss, "token_mean", 8, off_policy_threshold=0.1, loglinear=LogLinear(7, stale.correction)
    )
    assert Objective.of(stale, 7) == expected


def test_the_values_loss_by_hand() -> None:
    """v = 2 everywhere, R = 1: the squared error is 1. Clipped to old +- 0.5, row 0 (old 3) is at 2.5: 2.25."""
    old = torch.tensor([3.0, 2.0, 2.0, 1.0])[:, None] * torch.ones(4, 4)
    batch = ready(values=old, returns=torch.ones(4, 4))
    values = torch.full((4, 4), 2.0)
    plain = value_share(values, batch, torch.tensor(16.0), None)
    assert plain.loss.item() == pytest.approx(0.5 * 8 / 16)
    assert plain.metrics["clip_fraction"].item() == 0
    clipped = value_share(values, batch, torch.tensor(16.0), 0.5)  # row 3 (old 1) is at 1.5: 0.25, less than 1
    assert clipped.loss.item() == pytest.approx(0.5 * (2 * 2.25 + 6) / 16)
    assert clipped.metrics["clip_fraction"].item() == pytest.approx(2 / 8)  # row 0 has two of eight tokens
    above = value_share(torch.full((4, 4), 0.0), replace(batch, values=0 * old + 1), torch.tensor(8.0), 0.5)
    assert above.loss.item() == pytest.approx(0.5)  # 0 is further away than the bound of 0.5
