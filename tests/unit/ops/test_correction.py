"""Off-policy corrections, KL in the reward, reward shaping and averages, in numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rlkit.advantages import ReMax
from rlkit.filters import ZeroSignal
from rlkit.models.reference import WeightAverage
from rlkit.ops.correction import (
    AcceptanceRule,
    accepted,
    binary_kl,
    importance_weights,
    loglinear_logps,
    logp_mismatch,
    off_policy_tokens,
)
from rlkit.recipe import KLReward, Rejection, Shaping
from rlkit.testing import example_batch, example_trajectory
from rlkit.train.credit import KLPenalty, RewardShaper
from rlkit.types import Score

# ratios trainer / engine: row 0: 4, 1/4 and one outside the mask; row 1: 1.5, 1, 1
MASK = torch.tensor([[True, True, False], [True, True, True]])
ENGINE = torch.full((2, 3), -2.0)
TRAINER = ENGINE + torch.tensor([[4.0, 0.25, 99.0], [1.5, 1.0, 1.0]]).log()


def weights(level: str, low: float | None = None, high: float = 2.0) -> list[list[float]]:
    return importance_weights(TRAINER, ENGINE, MASK, level, low=low, high=high).tolist()  # type: ignore[arg-type]


def test_importance_weights_by_hand() -> None:
    assert weights("token") == [pytest.approx([2, 0.25, 0]), pytest.approx([1.5, 1, 1])]
    assert weights("token", low=0.5, high=5.0) == [pytest.approx([4, 0, 0]), pytest.approx([1.5, 1, 1])]
    # sequences: 4 * 1/4 = 1 and 1.5
    assert weights("sequence") == [pytest.approx([1, 1, 0]), pytest.approx([1.5] * 3)]
    assert weights("sequence", low=0.5, high=1.2) == [pytest.approx([1, 1, 0]), [0, 0, 0]]


def test_ratios_at_a_bound_are_within_it() -> None:
    """The engine's log-prob is 0 and the trainer's log 2: a ratio of exactly 2; or both are the same."""
    mask, engine = torch.tensor([[True]]), torch.zeros(1, 1)
    assert importance_weights(engine, engine, mask, low=1.0, high=1.0).tolist() == [[1.0]]
    double = torch.tensor([[2.0]]).log()
    assert accepted(double, engine, mask, AcceptanceRule(low=2.0, high=2.0)).tolist() == [[True]]
    assert accepted(-double, engine, mask, AcceptanceRule(high=2.0)).tolist() == [[True]]  # down to 1 / high
    assert accepted(engine + 1, engine, mask, AcceptanceRule("k2", high=0.5)).tolist() == [[True]]


def test_importance_weights_are_clamped_and_have_no_gradient() -> None:
    trainer = torch.tensor([[100.0]], requires_grad=True)
    found = importance_weights(trainer, torch.zeros(1, 1), torch.tensor([[True]]), high=1e12)
    assert not found.requires_grad
    assert found.item() == pytest.approx(math.exp(20), rel=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [[False, False, False], [True, True, True]]),  # ratios from 1/2 to 2
        ({"low": 0.2, "high": 3.0}, [[False, True, False], [True, True, True]]),
        ({"level": "seq_sum"}, [[True, True, False], [True, True, True]]),
        (
            {"level": "seq_mean", "high": 1.1},
            [[True, True, False], [False, False, False]],
        ),  # means 1, 1.5^(1/3) = 1.145
        ({"level": "seq_max", "high": 2.0}, [[False, False, False], [True, True, True]]),
        ({"level": "seq_max", "high": 4.5}, [[True, True, False], [True, True, True]]),  # the 99 is outside the mask
        ({"statistic": "k2", "level": "seq_mean", "high": 0.97}, [[True, True, False], [True, True, True]]),
        ({"statistic": "k2", "level": "seq_mean", "high": 0.95}, [[False, False, False], [True, True, True]]),
        ({"statistic": "k3", "level": "seq_sum", "high": 3.0}, [[True, True, False], [True, True, True]]),
        # k2: 0.96, 0.96; 0.082, 0, 0
        ({"statistic": "k2", "high": 0.5}, [[False, False, False], [True, True, True]]),
        # k3 = r - 1 - ln r: 1.61, 0.64; 0.095, 0, 0
        ({"statistic": "k3", "high": 1.0}, [[False, True, False], [True, True, True]]),
        ({"statistic": "k3", "level": "seq_max", "high": 1.0}, [[False] * 3, [True] * 3]),
        ({"statistic": "k3", "level": "seq_sum", "high": 0.05}, [[False] * 3, [False] * 3]),
        # of e^-2 = 0.1353 with 0.5413 and 0.0338: 0.4597, 0.0916; with 0.2030: 0.0174, 0, 0
        ({"statistic": "binary_kl", "high": 0.1}, [[False, True, False], [True, True, True]]),
        ({"statistic": "binary_kl", "level": "seq_mean", "high": 0.275}, [[False] * 3, [True] * 3]),
        ({"statistic": "binary_kl", "level": "seq_mean", "high": 0.276}, [[True, True, False], [True] * 3]),
    ],
)
def test_rejection_by_hand(options, expected: list[list[bool]]) -> None:
    assert accepted(TRAINER, ENGINE, MASK, AcceptanceRule(**options)).tolist() == expected


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [
        (0.5, 0.5, 0.0),
        (0.5, 0.25, 0.1438410),  # 0.5 ln 2 + 0.5 ln(2/3) = 0.1438; the other way 0.25 ln(1/2) + 0.75 ln(3/2) = 0.1308
        (0.9, 0.99, 0.1444793),  # 0.9 ln(0.9/0.99) + 0.1 ln 10 = 0.1445; the other way 0.0713
        (0.01, 0.02, 0.0039136),  # a ratio of 2, which k1 rejects below 1 / high: 0.02 ln 2 + 0.98 ln(0.98/0.99)
    ],
)
def test_binary_kl_by_hand(p: float, q: float, expected: float) -> None:
    one, other = torch.tensor([[p]]).log(), torch.tensor([[q]]).log()
    assert binary_kl(one, other).item() == pytest.approx(expected, rel=1e-4, abs=1e-9)
    assert binary_kl(other, one).item() == binary_kl(one, other).item()


@given(logps=st.lists(st.floats(-1e30, 0), min_size=2, max_size=2))
def test_binary_kl_is_finite_symmetric_and_not_negative(logps: list[float]) -> None:
    """Both ways of the largest distance, 1e-6 and 1 - 1e-6, are 13.8."""
    one, other = (torch.tensor([[x]]) for x in logps)
    assert 0 <= binary_kl(one, other).item() <= 13.82
    assert binary_kl(one, other).item() == pytest.approx(binary_kl(other, one).item(), abs=1e-12)
    assert binary_kl(one, one).item() == 0


def test_the_bound_of_a_rejection_depends_on_its_statistic() -> None:
    assert [Rejection(name).highest for name in ("k1", "k2", "k3", "binary_kl")] == [2, 2, 2, 0.1]
    assert Rejection("binary_kl", high=0.3).highest == 0.3


@pytest.mark.parametrize(
    ("threshold", "advantages", "expected"),
    [
        # engine - policy: row 0: (-ln 4 + ln 4) / 2 = 0; row 1: -ln(1.5) / 3; row 2: (ln 2 + ln 8) / 2 = 1.386
        (1.38, -1.0, [[False] * 3, [False] * 3, [True, True, False]]),
        (1.39, -1.0, [[False] * 3] * 3),
        (1.38, 1.0, [[False] * 3] * 3),
        (1.38, 0.0, [[False] * 3] * 3),
        (0.0, -1.0, [[False] * 3, [False] * 3, [True, True, False]]),
    ],
)
def test_far_sequences_with_low_advantage_are_excluded(
    threshold: float, advantages: float, expected: list[list[bool]]
) -> None:
    mask = torch.cat((MASK, torch.tensor([[True, True, False]])))
    policy = torch.cat((TRAINER, ENGINE[:1] - torch.tensor([[2.0, 8.0, 1e9]]).log()))
    engine, full = torch.cat((ENGINE, ENGINE[:1])), torch.full((3, 3), advantages)
    assert off_policy_tokens(policy, engine, full, mask, threshold).tolist() == expected


def test_only_tokens_with_a_negative_advantage_are_left_out() -> None:
    """Of one sequence, whose advantages differ from token to token."""
    mask, drifted = torch.tensor([[True, True, True]]), torch.tensor([[-3.0, -3.0, -3.0]])
    advantages = torch.tensor([[-1.0, 1.0, 0.0]])
    found = off_policy_tokens(drifted, drifted + 1, advantages, mask, 0.5)
    assert found.tolist() == [[True, False, False]]


def test_old_log_probs_between_the_engine_and_the_policy_by_hand() -> None:
    """Trained from version 5: staleness 1 (this version), 2, 4; 1 is the least, also outside the mask (-1 there)."""
    engine, policy = torch.tensor([[-1.0, -1.0, -1.0, 0.0]]), torch.tensor([[-3.0, -3.0, -3.0, 0.0]]).requires_grad_()
    found = loglinear_logps(policy, engine, torch.tensor([[5, 4, 2, -1]]), 5)
    assert found.tolist() == [[-1.0, -2.0, -2.5, 0.0]]  # -1 - 2 (1 - 1 / d)
    assert not found.requires_grad
    assert loglinear_logps(policy, engine, torch.full((1, 4), 6), 5).tolist() == engine.tolist()


@given(
    logps=st.lists(st.floats(-(2.0**99), 0, width=32), min_size=2, max_size=2),
    version=st.integers(0, 2**31 - 1),
    age=st.integers(0, 1000),
)
def test_old_log_probs_are_the_engines_for_fresh_tokens(logps: list[float], version: int, age: int) -> None:
    policy, engine = (torch.tensor([[x]]) for x in logps)
    found = loglinear_logps(policy, engine, torch.tensor([[version - age]]), version).item()
    slack = 1e-6 * -min(logps)
    assert min(logps) - slack <= found <= max(logps) + slack
    assert age or found == engine.item()


def test_gap_by_hand() -> None:
    metrics = logp_mismatch(TRAINER, ENGINE, MASK)
    ratios = [4, 0.25, 1.5, 1, 1]
    assert metrics.kl.item() == pytest.approx(-sum(map(math.log, ratios)) / 5, rel=1e-5)
    assert metrics.k3.item() == pytest.approx(sum(r - 1 - math.log(r) for r in ratios) / 5, rel=1e-5)
    assert metrics.chi2_token.item() == pytest.approx(sum(r * r for r in ratios) / 5 - 1, rel=1e-5)
    assert metrics.chi2_sequence.item() == pytest.approx((1 + 1.5**2) / 2 - 1, rel=1e-5)
    assert metrics.ess.item() == pytest.approx((sum(ratios) / 5) ** 2 / (sum(r * r for r in ratios) / 5), rel=1e-5)
    assert metrics.ppl_engine.item() == pytest.approx(math.exp(2), rel=1e-5)
    assert metrics.ppl_trainer.item() == pytest.approx((math.exp(2) + math.exp(2) / 1.5 ** (1 / 3)) / 2, rel=1e-5)
    e = math.exp(-2)
    assert metrics.probs_diff_mean.item() == pytest.approx(e * (3 + 0.75 + 0.5) / 5, rel=1e-5)
    same = logp_mismatch(ENGINE, ENGINE, MASK)
    assert (same.kl.item(), same.chi2_token.item(), same.ess.item()) == (0, pytest.approx(0, abs=1e-6), 1)


def test_the_correlation_of_probabilities_by_hand() -> None:
    # p = .1, .3, .2 and q = .1, .2, .3: deviations -.1, .1, 0 and -.1, 0, .1: .01 / .02; what is outside does not count
    mask = torch.tensor([[True, True, True, False]])
    p, q = torch.tensor([[0.1, 0.3, 0.2, 0.9]]).log(), torch.tensor([[0.1, 0.2, 0.3, 0.01]]).log()
    assert logp_mismatch(p, q, mask).probs_correlation.item() == pytest.approx(0.5, rel=1e-4)
    assert logp_mismatch(p, p, mask).probs_correlation.item() == pytest.approx(1, rel=1e-4)
    assert logp_mismatch(p, (0.5 - p.exp()).clamp(min=0.01).log(), mask).probs_correlation.item() == pytest.approx(
        -1, rel=1e-4
    )


def penalised(section: KLReward, steps: int = 1) -> tuple[KLPenalty, list[dict[str, float]], torch.Tensor]:
    penalty, metrics = KLPenalty(section), []
    for _ in range(steps):
        batch = example_batch([1.0, 0.0], [0, 0])
        batch.trainer_logps = -1.0 * batch.mask
        batch.ref_logps = -1.5 * batch.mask
        metrics.append(penalty.apply(batch, lambda x: x))
    return penalty, metrics, batch.token_rewards


def test_kl_in_the_reward_by_hand() -> None:
    # k1 = 0.5 at each token; the rewards of 1 and 0 stay on the last tokens
    _, [metrics], rewards = penalised(KLReward(coef=0.1))
    assert metrics == {"reward/kl_reward": pytest.approx(0.5), "reward/kl_coef": 0.1}
    assert rewards[0].tolist() == pytest.approx([0, 0, 0.95, 0, 0, 0])
    assert rewards[1].tolist() == pytest.approx([0, 0, -0.05, -0.05, 0, 0])


def test_the_kl_coefficient_adapts() -> None:
    # KL 0.5 against a target of 0.1: the error is clipped to 0.2; two trajectories, horizon 10
    _, metrics, _ = penalised(KLReward(coef=0.1, target=0.1, horizon=10), steps=2)
    assert metrics[1]["reward/kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 10))
    # against a target of 0.55 the error is 0.5 / 0.55 - 1
    penalty, _, _ = penalised(KLReward(coef=0.1, target=0.55, horizon=10))
    assert penalty.coef == pytest.approx(0.1 * (1 + (0.5 / 0.55 - 1) * 2 / 10))


@pytest.mark.parametrize(("target", "factor"), [(100.0, 0.8), (0.01, 1.2)])
def test_a_short_horizon_changes_the_coefficient_by_a_fifth(target: float, factor: float) -> None:
    """Two trajectories against a horizon of one: a factor beyond 1 would make the coefficient negative in time."""
    penalty, _, _ = penalised(KLReward(coef=0.1, target=target, horizon=1), steps=3)
    assert penalty.coef == pytest.approx(0.1 * factor**3)


def test_rewards_are_clipped_and_normalised() -> None:
    batch = example_batch([4.0, -4.0, 0.5, 0.0], [0, 0, 1, 1])
    RewardShaper(Shaping(clip=1.0)).apply(batch, lambda x: x)
    assert batch.outcomes().tolist() == pytest.approx([1, -1, 0.5, 0])
    assert batch.rewards.tolist() == [4, -4, 0.5, 0]
    shaper, seen = RewardShaper(Shaping(normalize=True)), []
    for rewards in ([1.0, 2.0], [3.0, 6.0, 7.0], [0.0]):
        batch = example_batch(rewards, [0] * len(rewards))
        shaper.apply(batch, lambda x: x)
        seen += rewards
        if len(seen) > 1:
            expected = [r / torch.tensor(seen).std().item() for r in rewards]
            assert batch.outcomes().tolist() == pytest.approx(expected, rel=1e-5)


def test_a_row_whose_rewards_cancel_out_is_divided_too() -> None:
    """Rewards 1 and 3 were seen, and now 0 = 2 - 2: the standard deviation of 1, 3, 0 is sqrt(7/3)."""
    shaper = RewardShaper(Shaping(normalize=True, clip=1.0))
    shaper.apply(example_batch([1.0, 3.0], [0, 0]), lambda x: x)
    batch = example_batch([0.0], [0])
    batch.token_rewards[0, :3] = torch.tensor([2.0, 0.0, -2.0])
    shaper.apply(batch, lambda x: x)
    expected = 2 / (7 / 3) ** 0.5
    assert batch.token_rewards[0, :3].tolist() == pytest.approx([expected, 0, -expected])


def test_the_greedy_baseline_is_shaped_like_rewards() -> None:
    """A reward of 10 and a greedy answer's of 10 are no advantage, clipped to 1 or not; 10 and -4 are 1 - -1."""
    for shaping, greedy, expected in (
        (Shaping(clip=1.0), 10.0, 0.0),
        (Shaping(clip=1.0), -4.0, 2.0),
        (Shaping(normalize=True), 4.0, 6 / 8**0.5),
    ):
        rewards = [10.0, 6.0] if shaping.normalize else [10.0]  # their standard deviation is sqrt(8)
        batch = example_batch(rewards, [0] * len(rewards))
        batch.greedy_rewards = torch.full_like(batch.rewards, greedy)
        RewardShaper(shaping).apply(batch, lambda x: x)
        ReMax().estimate(batch)
        assert batch.advantages is not None
        assert batch.advantages[0][batch.mask[0]].tolist() == pytest.approx([expected])


def test_a_weight_average_follows_and_is_applied_for_a_while() -> None:
    module = nn.Linear(1, 1, bias=False)
    module.weight.data.fill_(1.0)
    average = WeightAverage(module, decay=0.75)
    assert not any(tensor.requires_grad for tensor in average.tensors)
    module.weight.data.fill_(2.0)
    average.update()  # 0.75 * 1 + 0.25 * 2
    with average.applied():
        assert module.weight.item() == 1.25
    assert module.weight.item() == 2.0
    average.update()
    with average.applied():
        assert module.weight.item() == pytest.approx(0.75 * 1.25 + 0.25 * 2)


def test_zero_signal_keeps_groups_whose_rewards_differ() -> None:
    def group(*scores: Score):
        trajectories = [example_trajectory("x") for _ in scores]
        for trajectory, score in zip(trajectories, scores, strict=True):
            trajectory.score = score
        return trajectories

    equal = group(Score(1.0, {"accuracy": 1.0}), Score(1.0, {"accuracy": 0.0}))
    assert not ZeroSignal().keep(equal)
    assert ZeroSignal(component="accuracy").keep(equal)
    assert ZeroSignal().keep(group(Score(1.0), Score(0.5)))
    assert 0.1 + 0.2 != 0.3
    assert not ZeroSignal().keep(group(Score(0.1 + 0.2), Score(0.3)))  # float32 of both is 0.3, so the advantage is 0
    assert ZeroSignal().keep(group(Score(0.3 + 2**-25), Score(0.3)))  # one unit in the last place of float32 apart


def test_the_mismatch_of_all_ranks_takes_three_reductions() -> None:
    """Two ranks with the same rows: sums and counts double, and means stay."""
    reductions = []

    def reduce(x: torch.Tensor) -> torch.Tensor:
        reductions.append(x)
        return 2 * x

    torch.testing.assert_close(logp_mismatch(TRAINER, ENGINE, MASK, reduce), logp_mismatch(TRAINER, ENGINE, MASK))
    assert len(reductions) == 3
