"""Losses in numbers worked by hand, their gradients, and what holds for all of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlkit_authors import golden

from rlkit.base.ranges import outside
from rlkit.interfaces.loss import PolicyLoss
from rlkit.losses import (
    CISPO,
    DPPO,
    DRO,
    GMPO,
    GSPO,
    M2PO,
    SAPO,
    TOPR,
    VESPO,
    ClipCov,
    ClipLoss,
    KLCov,
    PolicyGradient,
)
from rlkit.ops import aggregate
from rlkit.testing import check_loss, example_batch
from rlkit.types import LossOutput, PolicyOutput, TrainBatch

SMOOTH = [ClipLoss(), ClipLoss(clip_dual=3.0), PolicyGradient(), SAPO(), GMPO(), KLCov(fraction=0.2), M2PO(), DRO()]
ALL = [*SMOOTH, GSPO(), CISPO(), DPPO(), DPPO("kl"), ClipCov(fraction=0.2), VESPO(), TOPR()]


def name(loss: object) -> str:
    return type(loss).__name__ if isinstance(loss, PolicyLoss) else ""


def row(log_ratios: list[float], advantage: float, old: float = -1.0) -> tuple[TrainBatch, torch.Tensor]:
    """Make one row of as many tokens, and the current log-probs."""
    n = len(log_ratios)
    mask = torch.ones(1, n, dtype=torch.bool)
    zeros = torch.zeros(1, n)
    batch = TrainBatch(
        tokens=torch.arange(n)[None],
        attention=mask,
        mask=mask,
        rollout_logps=zeros,
        group=torch.tensor([0]),
        versions=torch.zeros(1, n, dtype=torch.long),
        token_rewards=zeros,
        rewards=torch.zeros(1),
        components=torch.zeros(1, 0),
        old_logps=torch.full((1, n), old),
        advantages=torch.full((1, n), float(advantage)),
        trainer_logps=torch.full((1, n), old),
        accepted=mask,
        selected=torch.zeros(1, n, dtype=torch.bool),
    )
    return batch, torch.tensor([log_ratios]) + old


def per_token(loss: PolicyLoss, log_ratios: list[float], advantage: float, **options: float) -> list[float]:
    batch, logps = row(log_ratios, advantage, **options)
    return loss(PolicyOutput(logps, None), batch).per_token[0].tolist()


@pytest.mark.parametrize(
    ("vector", "loss"),
    [
        ("ClipLoss", ClipLoss()),
        ("ClipLoss with dual clip", ClipLoss(clip_dual=3.0)),
        ("PolicyGradient", PolicyGradient()),
        ("SAPO", SAPO()),
        ("CISPO", CISPO(1.0, 0.2)),
    ],
)
def test_golden_tokens(vector: str, loss: PolicyLoss) -> None:
    golden.check(vector, loss)


def test_gspo_by_hand() -> None:
    # s = exp(mean(0.1, 0.3, -0.1)) = e^0.1 = 1.105171, the same for each token; with bounds of 0.2 not clipped
    assert per_token(GSPO(0.2, 0.2), [0.1, 0.3, -0.1], 1) == pytest.approx([-1.105171] * 3, rel=1e-5)
    assert per_token(GSPO(0.2, 0.05), [0.1, 0.3, -0.1], 1) == pytest.approx([-1.05] * 3, rel=1e-5)
    assert GSPO.aggregation == "seq_mean_token_mean"


def test_luspo_is_gspo_summed_over_tokens() -> None:
    """LUSPO (arXiv:2602.05261) multiplies a sequence's clipped ratio with its length: -A s |y|, mean over sequences."""
    batch, logps = row([0.1, 0.3, -0.1], 1)
    weights = aggregate.weights(batch.mask, "seq_mean_token_sum", sequences=1)
    total_loss = (GSPO(0.2, 0.2)(PolicyOutput(logps, None), batch).per_token * weights).sum()
    assert total_loss.item() == pytest.approx(-3 * 1.105171, rel=1e-5)


def test_vespo_by_hand() -> None:
    # w = e^0.3 = 1.349859 for the sequence. A > 0: w^2 e^(3 (1 - w)) = 1.822119 * 0.350084 = 0.637895
    assert per_token(VESPO(), [0.1, 0.3, -0.1], 1) == pytest.approx([0.637895 * x for x in (0.9, 0.7, 1.1)], rel=1e-5)
    # A < 0: w^3 e^(2 (1 - w)) = 2.459603 * 0.496725 = 1.221747, which exceeds 1: the maximum is at w = 1.5
    assert per_token(VESPO(), [0.1, 0.3, -0.1], -2) == pytest.approx(
        [-2 * 1.221747 * x for x in (0.9, 0.7, 1.1)], rel=1e-5
    )
    assert per_token(VESPO(), [15.0, 15.0], 1) == [0, 0]  # e^20, the bound of w: no weight
    assert per_token(VESPO(), [-15.0, -15.0], -1) == pytest.approx([-16 * 1e-24 * math.exp(2)] * 2, rel=1e-4)


def test_topr_by_hand() -> None:
    # w = e^-0.3 = 0.740818 tapers where A < 0 only; w = e^0.3 is cut to 1
    assert per_token(TOPR(), [-0.1, -0.3, 0.1], -1) == pytest.approx([-0.740818 * x for x in (1.1, 1.3, 0.9)], rel=1e-5)
    assert per_token(TOPR(), [-0.1, -0.3, 0.1], 1) == pytest.approx([1.1, 1.3, 0.9])
    assert per_token(TOPR(), [0.1, 0.3, -0.1], -1) == pytest.approx([-0.9, -0.7, -1.1])


@pytest.mark.parametrize("loss", [VESPO(), TOPR()], ids=name)
def test_a_sequence_weight_ignores_tokens_outside_the_mask(loss: PolicyLoss) -> None:
    batch, logps = row([0.1, 0.3, -0.1, 0.0], -1)
    batch.mask = torch.tensor([[True, True, True, False]])
    logps[0, 3] = 5.0
    masked = loss(PolicyOutput(logps, None), batch).per_token[0, :3].tolist()
    assert masked == per_token(loss, [0.1, 0.3, -0.1], -1)


def test_dro_by_hand() -> None:
    # -A logp + 0.5 / 2 lr^2: lr = 0.2: 0.8 + 0.01; lr = -0.4: 1.4 + 0.04; without an advantage the penalty remains
    assert per_token(DRO(0.5), [0.2, -0.4], 1) == pytest.approx([0.81, 1.44])
    assert per_token(DRO(0.5), [0.2, -0.4], 0) == pytest.approx([0.01, 0.04])


def test_gmpo_by_hand() -> None:
    # A > 0: log-ratios above 0.2 are cut: exp((0.1 + 0.2 - 0.1) / 3) = 1.068939; A < 0: nothing below -0.2: e^0.1
    assert per_token(GMPO(0.2, 0.2), [0.1, 0.3, -0.1], 1) == pytest.approx([-1.068939] * 3, rel=1e-5)
    assert per_token(GMPO(0.2, 0.2), [0.1, 0.3, -0.1], -1) == pytest.approx([1.105171] * 3, rel=1e-5)
    batch, logps = row([0.1, 0.3, -0.1], 1)
    batch.correction_weights = torch.tensor([[2.0, 0.5, 8.0]])  # geometric mean 2
    found = GMPO(0.2, 0.2)(PolicyOutput(logps, None), batch).per_token[0]
    assert found.tolist() == pytest.approx([-2 * 1.068939] * 3, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "ratio", "advantage", "valid"),
    [
        # old probability 0.5; ratio 1.5: p = 0.75, tv 0.25, kl = 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25) = 0.143841
        ("tv", 1.5, 1, False),
        ("tv", 1.5, -1, True),
        ("tv", 0.5, 1, True),
        ("tv", 0.5, -1, False),
        ("kl", 1.5, 1, True),
        ("kl", 1.8, 1, False),  # p = 0.9: 0.510826
        ("kl", 1.8, -1, True),
        ("kl", 0.2, -1, False),
        ("kl", 0.9, -1, True),  # p = 0.45: 0.005025
        ("kl", 0.2, 1, True),
    ],
)
def test_dppo_by_hand(kind: str, ratio: float, advantage: float, valid: bool) -> None:
    old = math.log(0.5)
    [found] = per_token(DPPO(kind, 0.2, 0.2), [math.log(ratio)], advantage, old=old)
    assert found == pytest.approx(-advantage * ratio * (old + math.log(ratio)) * valid, rel=1e-5)


def test_dppo_caps_the_ratio() -> None:
    # old probability 0.001: a ratio of 30 is a difference of 0.029 only
    old = math.log(0.001)
    [found] = per_token(DPPO("tv", cap=20.0), [math.log(30)], 1, old=old)
    assert found == pytest.approx(-20 * math.log(0.03), rel=1e-5)
    [found] = per_token(DPPO("tv", cap=40.0), [math.log(30)], 1, old=old)
    assert found == pytest.approx(-30 * math.log(0.03), rel=1e-5)


def covariance_batch() -> tuple[TrainBatch, torch.Tensor]:
    """Advantages 2 and -2 in turn, log-probs that rise: the covariance of each token is easy to order."""
    batch, _ = row([0.0] * 6, 0)
    batch.advantages = torch.tensor([[2.0, -2, 2, -2, 2, -2]])
    batch.old_logps = torch.tensor([[-1.0, -1, -2, -2, -6, -6]])
    return batch, batch.old_logps.clone()


def test_kl_cov_penalises_the_tokens_of_the_largest_covariance() -> None:
    # mean A = 0, mean logp = -3: cov = A (logp + 3) = 4, -4, 2, -2, -6, 6
    batch, logps = covariance_batch()
    loss = KLCov(fraction=0.34, coef=0.5)  # two of six tokens
    batch.selected = loss.select(logps, batch)
    assert batch.selected.tolist() == [[True, False, False, False, False, True]]
    found = loss(PolicyOutput(logps + 0.1, None), batch).per_token[0]
    r = math.exp(0.1)
    assert found.tolist() == pytest.approx([-2 * r + 0.05, 2 * r, -2 * r, 2 * r, -2 * r, 2 * r + 0.05], rel=1e-5)


def test_kl_cov_penalises_nothing_without_a_signal() -> None:
    batch, logps = covariance_batch()
    for advantage in (0.0, 0.7):
        batch.advantages = torch.full_like(batch.advantages, advantage)
        assert not KLCov(fraction=0.34).select(logps, batch).any()


def test_clip_cov_silences_some_of_the_tokens_between_its_bounds() -> None:
    batch, logps = covariance_batch()
    loss = ClipCov(fraction=0.2, cov_low=1.0, cov_high=5.0)  # one of six, among cov 4 and 2
    batch.selected = loss.select(logps, batch)
    assert batch.selected.sum() == 1
    assert not batch.selected[0, [1, 3, 4, 5]].any()
    found = loss(PolicyOutput(logps, None), batch).per_token[0]
    assert [x == 0 for x in found.tolist()] == batch.selected[0].tolist()
    assert ClipCov(fraction=1e-9, cov_low=100.0, cov_high=200.0).select(logps, batch).sum() == 0


def test_tokens_outside_the_mask_are_never_selected() -> None:
    # of the five left: mean A = -0.4, mean logp = -3.4: cov = (5.76 outside), -3.84, 3.36, -2.24, -6.24, 4.16
    batch, logps = covariance_batch()
    batch.mask = torch.tensor([[False, True, True, True, True, True]])
    clip_cov = ClipCov(fraction=1.0, cov_low=1.0, cov_high=6.0)
    assert clip_cov.select(logps, batch).tolist() == [[False, False, True, False, False, True]]
    assert KLCov(fraction=0.34).select(logps, batch).tolist() == [[False, False, False, False, False, True]]


@pytest.mark.parametrize(("low", "high", "chosen"), [(2, 4, []), (1.99, 4, [2]), (2, 4.01, [0]), (4, 6, [])])
def test_a_covariance_at_a_bound_of_clip_cov_is_outside_it(low: float, high: float, chosen: list[int]) -> None:
    batch, logps = covariance_batch()  # cov = 4, -4, 2, -2, -6, 6
    selected = ClipCov(fraction=1.0, cov_low=low, cov_high=high).select(logps, batch)
    assert selected[0].nonzero().flatten().tolist() == chosen


def sampled(distances: list[float], advantage: float) -> tuple[TrainBatch, torch.Tensor]:
    """Make one row whose log-probs are at these distances from the engine's, which are the old ones."""
    batch, logps = row(distances, advantage)
    batch.rollout_logps = batch.old_logps
    return batch, logps


@pytest.mark.parametrize(
    ("threshold", "advantage", "selected"),
    [
        # A > 0 bounds 0.1, 0.3, 0.2 and 0.4: squares of 0.01, 0.04, 0.09, 0.16 with means 0.01, 0.025, 0.0467, 0.075
        (0.04, 1.0, [1, 4]),
        (0.05, 1.0, [4]),
        (0.0751, 1.0, []),
        (0.005, 1.0, [0, 1, 3, 4]),
        # A < 0 bounds -0.5: 0.25
        (0.04, -1.0, [2]),
        (0.26, -1.0, []),
        (0.0, 0.0, []),
    ],
)
def test_m2po_by_hand(threshold: float, advantage: float, selected: list[int]) -> None:
    batch, logps = sampled([0.1, 0.3, -0.5, 0.2, 0.4], advantage)
    loss = M2PO(threshold)
    batch.selected = loss.select(logps, batch)
    assert batch.selected[0].nonzero().flatten().tolist() == selected
    result = loss(PolicyOutput(logps, None), batch)
    ratios = [math.exp(x) for x in (0.1, 0.3, -0.5, 0.2, 0.4)]
    expected = [0.0 if i in selected else -advantage * r for i, r in enumerate(ratios)]
    assert result.per_token[0].tolist() == pytest.approx(expected, rel=1e-5)
    assert result.metrics["clip_fraction"].item() == pytest.approx(len(selected) / 5)


def test_m2po_measures_ratios_and_distances_apart() -> None:
    """The policy is 0.5 above the old one everywhere; the engine is as the policy, but at the second token."""
    batch, logps = row([0.5, 0.5], 1)
    batch.rollout_logps = logps - torch.tensor([[0.0, 1.0]])
    loss = M2PO()
    batch.selected = loss.select(logps, batch)
    assert loss(PolicyOutput(logps, None), batch).per_token[0].tolist() == [pytest.approx(-math.exp(0.5)), 0]
    batch.accepted = torch.tensor([[True, False]])
    assert not loss.select(logps, batch).any()  # what is rejected is not learned from


@given(
    distances=st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=12),
    split=st.integers(0, 12),
    threshold=st.floats(0, 4),
    advantage=st.sampled_from([1.0, -2.0]),
)
def test_m2po_bounds_the_moment_over_all_ranks(
    distances: list[float], split: int, threshold: float, advantage: float
) -> None:
    batch, logps = sampled(distances, advantage)
    batch.rollout_logps, logps = torch.zeros_like(logps), torch.tensor([distances])
    whole = M2PO(threshold).select(logps, batch)
    bounded, squares = advantage * logps > 0, logps.square()
    kept = squares[bounded & ~whole].double()
    assert kept.sum() <= threshold * len(kept) * (1 + 1e-9)
    if whole.any():
        assert not (whole & ~bounded).any()
        smallest = squares[whole].min()
        assert bool((kept < smallest).all())
        more = torch.cat((kept, smallest[None].double()))
        assert more.mean() > threshold * (1 - 1e-9) or (squares[bounded] == smallest).sum() > 1
    parts = []
    for columns in (slice(split), slice(split, None)):
        part, _ = sampled(distances[columns], advantage)
        part.rollout_logps = torch.zeros_like(part.old_logps)
        loss = M2PO(threshold)
        loss.gather = lambda _: squares[bounded]  # type: ignore[method-assign]
        parts.append(loss.select(logps[:, columns], part))
    assert torch.equal(torch.cat(parts, -1), whole)


def test_m2po_on_policy_is_the_plain_policy_gradient() -> None:
    batch, _ = example()
    batch.rollout_logps, gradients = batch.old_logps, []
    for which in (M2PO(), PolicyGradient()):
        logps = batch.old_logps.clone().requires_grad_()
        gradients.append(torch.autograd.grad(total(which, logps, batch), logps)[0])
    torch.testing.assert_close(*gradients)


def example(dtype: torch.dtype = torch.float64) -> tuple[TrainBatch, torch.Tensor]:
    """Make four rows in double precision with ratios around 1, some beyond the clip's bounds."""
    batch = TrainBatch.of(replace(example_batch(), advantages=torch.zeros(4, 6)))
    generator = torch.Generator().manual_seed(0)
    batch.old_logps = (-1 - torch.rand(batch.mask.shape, generator=generator)).to(dtype) * batch.mask
    shift = 0.5 * torch.randn(batch.mask.shape, generator=generator).to(dtype) * batch.mask
    batch.advantages = torch.randn(len(batch), 1, generator=generator).to(dtype) * batch.mask
    return batch, batch.old_logps + shift


def total(loss: PolicyLoss, logps: torch.Tensor, batch: TrainBatch) -> torch.Tensor:
    if loss.selects:
        batch.selected = loss.select(logps.detach(), batch)
    weights = aggregate.weights(batch.mask, "seq_mean_token_mean", sequences=4).double()
    return (loss(PolicyOutput(logps, None), batch).per_token * weights).sum()


@pytest.mark.parametrize("loss", SMOOTH, ids=name)
def test_gradients_equal_finite_differences(loss: PolicyLoss) -> None:
    batch, logps = example()
    assert torch.autograd.gradcheck(lambda x: total(loss, x, batch), logps.requires_grad_(), eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("loss", [GSPO(0.2, 0.2), CISPO(1.0, 0.2), DPPO(), DPPO("kl"), VESPO(), TOPR()], ids=name)
def test_gradients_with_stopped_weights_by_formula(loss: PolicyLoss) -> None:
    """d loss / d logp = -A w for a stopped weight w: the clipped ratio, or the sequence's where it is not clipped."""
    batch, logps = example()
    assert batch.advantages is not None
    (found,) = torch.autograd.grad(total(loss, logps.requires_grad_(), batch), logps)
    mask, a, lr = batch.mask, batch.advantages, (logps.detach() - batch.old_logps)
    if isinstance(loss, GSPO):
        s = ((lr * mask).sum(-1) / mask.sum(-1)).exp()[:, None]
        weight = s * ~(((a > 0) & (s > 1.2)) | ((a < 0) & (s < 0.8)))
    elif isinstance(loss, CISPO):
        weight = lr.exp().clamp(0, 1.2)
    elif isinstance(loss, TOPR):
        weight = torch.where(a < 0, (lr * mask).sum(-1, keepdim=True).exp().clamp(max=1), 1.0)
    elif isinstance(loss, VESPO):
        w = (lr * mask).sum(-1, keepdim=True).exp()
        weight = torch.where(a < 0, w**3 * (2 - 2 * w).exp(), w**2 * (3 - 3 * w).exp())
    else:
        weight = lr.exp() * loss._within(logps.detach(), batch.old_logps, a > 0)
    expected = -a * weight * mask / mask.sum(-1, keepdim=True) / 4
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loss", [x for x in ALL if not isinstance(x, ClipCov | M2PO)], ids=name)
def test_on_policy_the_gradient_is_the_plain_policy_gradient(loss: PolicyLoss) -> None:
    batch, _ = example()
    gradients = []
    for which in (loss, PolicyGradient()):
        logps = batch.old_logps.clone().requires_grad_()
        gradients.append(torch.autograd.grad(total(which, logps, batch), logps)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    "loss", [x for x in ALL if not x.selects] + [KLCov(), M2PO(), ClipLoss(clip_dual=2.0)], ids=name
)
def test_losses_keep_the_contract(loss: PolicyLoss) -> None:
    check_loss(loss)


def test_a_metric_with_a_gradient_breaks_the_contract() -> None:
    class Graded(PolicyGradient):
        def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
            return LossOutput(-batch.advantages * out.logps, {"logp": out.logps.mean()})

    with pytest.raises(AssertionError, match="Graded returned the metric 'logp' with a gradient"):
        check_loss(Graded())


@pytest.mark.parametrize(
    ("loss", "factor"),
    [(ClipLoss(0.0, 1e12), -1.0), (CISPO(0.0, 1e12), 5.0), (DPPO(cap=1e12), 5.0), (DPPO("kl", cap=1e12), 5.0)],
    ids=name,
)
def test_ratios_are_at_most_e_to_the_20(loss: PolicyLoss, factor: float) -> None:
    """A token goes from a log-prob of -30 to -5: a log-ratio of 25. CISPO and DPPO weigh the log-prob with it."""
    [found] = per_token(loss, [25.0], 1, old=-30.0)
    assert found == pytest.approx(factor * math.exp(20), rel=1e-5)


def test_ratios_are_at_least_e_to_the_minus_20() -> None:
    """From -1 to -26, a log-prob that is weighed with the ratio."""
    assert per_token(DPPO(), [-25.0], 1) == pytest.approx([26 * math.exp(-20)], rel=1e-5)
    assert per_token(ClipLoss(1.0), [-25.0], 1) == pytest.approx([-math.exp(-20)], rel=1e-5)
    assert per_token(CISPO(1.0), [-25.0], 1) == pytest.approx([26 * math.exp(-20)], rel=1e-5)


@pytest.mark.parametrize("kind", ["tv", "kl"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_divergence_at_its_bound_is_within_it(kind: Literal["tv", "kl"], advantage: float) -> None:
    """On-policy the divergence is 0: bounds of 0 leave the gradient as it is."""
    assert per_token(DPPO(kind, 0.0, 0.0), [0.0], advantage) == [advantage]


@pytest.mark.parametrize(
    ("loss", "share"),
    [
        (ClipLoss(), 1 / 4),  # the first is above 1.2; below 0.8 the advantage clips nothing
        (ClipCov(), 1 / 4),
        (GMPO(), 1 / 4),  # 0.5 is above 0.4
        (DPPO(), 1 / 4),  # e^-0.5 - e^-1 = 0.24 is above 0.2
        (CISPO(0.2, 0.2), 2 / 4),  # whatever the advantage is
        (GSPO(0.2, 0.2), 0.0),  # e^0.025
        (GSPO(0.2, 0.01), 1.0),
    ],
    ids=name,
)
def test_the_clipped_share_and_the_divergence_by_hand(loss: PolicyLoss, share: float) -> None:
    """Of log-ratios 0.5, -0.5, 0 and 0.1 the mean is 0.025; a token outside the mask counts in neither."""
    batch, logps = row([0.5, -0.5, 0.0, 0.1, 3.0], 1)
    batch.mask = torch.tensor([[True, True, True, True, False]])
    metrics = loss(PolicyOutput(logps, None), batch).metrics
    assert metrics["clip_fraction"].item() == pytest.approx(share)
    assert metrics["kl_old"].item() == pytest.approx(-0.025, rel=1e-4)


def test_the_share_of_the_dual_clip_by_hand() -> None:
    """Of ratios e^1.5 = 4.5, 1 and e^2 the first and the last are above 3, where the advantage is negative."""
    for advantage, share in ((-1.0, 2 / 3), (1.0, 0.0)):
        batch, logps = row([1.5, 0.0, 2.0], advantage)
        metrics = ClipLoss(clip_dual=3.0)(PolicyOutput(logps, None), batch).metrics
        assert metrics["clip_dual_fraction"].item() == pytest.approx(share)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (GSPO(clip_low=2), "clip_low is 2, expected a number from 0 to 1"),
        (CISPO(clip_high=-1), "clip_high is -1, expected a number of 0 or more"),
        (SAPO(tau_pos=0), "tau_pos is 0, expected a number above 0"),
        (DPPO(cap=0.5), "cap is 0.5, expected a number of 1 or more"),
        (KLCov(fraction=2), "fraction is 2, expected a number above 0 and at most 1"),
        (M2PO(-1), "m2_threshold is -1, expected a number of 0 or more"),
        (ClipCov(fraction=0), "fraction is 0, expected a number above 0"),
    ],
)
def test_options_out_of_range_are_refused(loss: PolicyLoss, message: str) -> None:
    assert message in next(outside(loss))
