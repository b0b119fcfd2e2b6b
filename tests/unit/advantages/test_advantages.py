"""Estimators in numbers worked by hand (the formulae are in each class), and what holds for all of them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlkit_authors import golden

from rlkit.advantages import (
    GAE,
    GDPO,
    GPG,
    GRPO,
    OPO,
    RAE,
    RLOO,
    MaxRL,
    OptimalAdvantage,
    OptimalTokenBaseline,
    PassK,
    ReinforcePP,
    ReinforcePPBaseline,
    ReMax,
)
from rlkit.base.errors import PartError, RecipeError
from rlkit.base.ranges import outside
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.ops.masked import whiten
from rlkit.train import credit
from rlkit.types import Batch

GROUPED = [
    GRPO(), GRPO(scale_by_std=False), GRPO(scale_by_std="batch"), RLOO(), OPO(), PassK(), GPG(), MaxRL(),
    ReinforcePPBaseline(),
]  # fmt: skip


def batch_of(
    rewards: Sequence[float], groups: Sequence[int], lengths: Sequence[int], prompt: int = 2, **fields: torch.Tensor
) -> Batch:
    """Make rows with a prompt, an answer of the given length, and the reward on the answer's last token."""
    width = prompt + max(lengths)
    columns = torch.arange(width)
    ends = prompt + torch.tensor(lengths)[:, None]
    mask = (columns >= prompt) & (columns < ends)
    token_rewards = torch.zeros(len(rewards), width)
    token_rewards[torch.arange(len(rewards)), ends[:, 0] - 1] = torch.tensor(list(rewards), dtype=torch.float32)
    return tokens_batch(token_rewards, mask, groups, attention=columns < ends, **fields)


def tokens_batch(
    token_rewards: torch.Tensor,
    mask: torch.Tensor,
    groups: Sequence[int],
    attention: torch.Tensor | None = None,
    **fields: torch.Tensor,
) -> Batch:
    shape = token_rewards.shape
    return Batch(
        tokens=torch.zeros(shape, dtype=torch.long),
        attention=torch.ones(shape, dtype=torch.bool) if attention is None else attention,
        mask=mask,
        rollout_logps=torch.zeros(shape),
        group=torch.tensor(groups),
        versions=torch.zeros(shape, dtype=torch.long),
        token_rewards=token_rewards,
        rewards=token_rewards.sum(-1),
        components=fields.pop("components", torch.zeros(shape[0], 0)),
        component_names=fields.pop("component_names", ()),
        **fields,
    )


def advantages(estimator: AdvantageEstimator, batch: Batch) -> torch.Tensor:
    estimator.estimate(batch)
    batch.check()
    assert batch.advantages is not None
    assert not batch.advantages[~batch.mask].any()
    return batch.advantages


def per_row(estimator: AdvantageEstimator, batch: Batch) -> list[float]:
    """Return each row's advantage, which must be the same at all its tokens."""
    found = advantages(estimator, batch)
    rows = [row[mask] for row, mask in zip(found, batch.mask, strict=True)]
    assert all((row == row[0]).all() for row in rows)
    return [row[0].item() for row in rows]


GOLDEN = (golden.REWARDS, golden.GROUPS, golden.LENGTHS)


@pytest.mark.parametrize(
    ("name", "estimator"),
    [
        ("GRPO", GRPO()),
        ("GRPO without scaling", GRPO(scale_by_std=False)),
        ("RLOO", RLOO()),
        ("OPO", OPO()),
        ("GPG", GPG()),
        ("MaxRL", MaxRL()),
        ("PassK", PassK()),
    ],
)
def test_golden_groups(name: str, estimator: AdvantageEstimator) -> None:
    golden.check(name, estimator)


def test_golden_vectors_catch_another_formula() -> None:
    with pytest.raises(AssertionError, match="GRPO: "):
        golden.check("GRPO", GRPO(scale_by_std=False))


def test_grpo_with_the_batchs_deviation_by_hand() -> None:
    # R - mean: four of +-0.5, three of 0, mean 0: variance 4 * 0.25 / 6; with the same on a second rank 8 * 0.25 / 13
    estimator = GRPO(scale_by_std="batch")
    signs = [1, -1, -1, 1, 0, 0, 0]
    assert per_row(estimator, batch_of(*GOLDEN)) == pytest.approx([s * 0.5 * 6**0.5 for s in signs], rel=1e-5)
    estimator.reduce = lambda x: 2 * x  # type: ignore[method-assign]
    assert per_row(estimator, batch_of(*GOLDEN)) == pytest.approx([s * 0.5 * 6.5**0.5 for s in signs], rel=1e-5)
    assert estimator.explain() == "A = (R - mean_group) / (std_batch(R - mean_group) + 1e-06)"


@pytest.mark.parametrize(
    ("beta", "values"),
    [
        (1.0, [math.log(2), 2.0]),  # the mean of exp(log 3) and exp(0) is 2; one sample is its own value
        (0.5, [0.5 * math.log(5), 2.0]),  # of 9 and 1 it is 5
        (1e4, [math.log(3) / 2, 2.0]),  # the mean
        (1e-4, [math.log(3), 2.0]),  # the maximum
    ],
)
def test_the_optimal_advantage_by_hand(beta: float, values: list[float]) -> None:
    reference = torch.tensor([[math.log(3), 0.0], [2.0, math.nan]])
    batch = batch_of([1.0, 0.0], [0, 1], [2, 3], reference_rewards=reference)
    expected = [1.0 - values[0], 0.0 - values[1]]
    assert per_row(OptimalAdvantage(beta), batch) == pytest.approx(
        expected, abs=2e-4 if beta < 0.1 or beta > 10 else 1e-6
    )
    assert batch.rows(torch.tensor([1])).reference_rewards.shape == (1, 2)


def test_rae_by_hand() -> None:
    """Returns 1 and 0 of the first role, -1 of the second: b = (1 - 0.5^2) 0.5 = 0.375, and (1 - 0.5) -1 = -0.5."""

    def batch() -> Batch:
        made = batch_of([1.0, 0.0, -1.0], [0, 1, 0], [2, 3, 1], role=torch.tensor([0, 0, 1]))
        made.role_names = ("first", "second")
        return made

    estimator = RAE(decay=0.5)
    assert per_row(estimator, batch()) == [1.0, 0.0, -1.0]
    assert estimator.state_dict() == {"first": 0.375, "second": -0.5}
    resumed, other_rank = RAE(decay=0.5), RAE(decay=0.5)
    resumed.load_state_dict(estimator.state_dict())
    second = batch()
    assert per_row(resumed, second) == per_row(estimator, batch()) == [0.625, -0.375, -0.5]
    assert second.metrics == {"baseline/first": 0.375, "baseline/second": -0.5}
    assert resumed.state_dict() == estimator.state_dict() == {"first": 0.25 * 0.375 + 0.375, "second": -0.75}
    other_rank.reduce = lambda x: 2 * x  # type: ignore[method-assign] # the same rows on a second rank
    other_rank.estimate(batch())
    assert other_rank.state_dict() == {"first": 0.5 * (1 - 0.5**4), "second": -0.75}
    with pytest.raises(ValueError, match=r"batch\.role is not computed in this run; .* Needs.ROLES"):
        RAE().estimate(batch_of([1.0], [0], [2]))


def test_reinforce_pp_baseline_by_hand() -> None:
    # centred rewards, weighted by length: a 0.5*2 - 0.5*4 - 0.5*3 + 0.5*3 = -1 over 18 tokens: mean -1/18;
    # squares: 12 tokens of 0.25 = 3; variance (3 - 18/18^2) / 17 = 0.173202
    deviation = math.sqrt((3 - 1 / 18) / 17)
    up, down, zero = ((x + 1 / 18) / deviation for x in (0.5, -0.5, 0.0))
    found = per_row(ReinforcePPBaseline(), batch_of(*GOLDEN))
    assert found == pytest.approx([up, down, down, up, zero, zero, zero], rel=1e-5)


def test_pass_k_by_hand() -> None:
    # group 0: best 3, second 1, std of [0, 1, 3] = 1.527525; group 1 is a tie for best
    batch = batch_of([0, 3, 1, 2, 2, 0], [0, 0, 0, 1, 1, 1], [1, 2, 3, 1, 1, 1])
    assert per_row(PassK(), batch) == pytest.approx([0, 2 / 1.527526, 0, 0, 0, 0], abs=1e-5)
    assert per_row(PassK(scale_by_std=False), batch) == [0, 2, 0, 0, 0, 0]


REWARDS = torch.tensor([[0.0, 0, 0, 1]])
VALUES = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
GAPPED = torch.tensor([[True, True, False, True]])


def test_gae_by_hand() -> None:
    # t=3: 1 - 0.4 = 0.6; t=2 is an observation; t=1: 0.9 * 0.4 - 0.2 + 0.855 * 0.6 = 0.673; t=0: 0.9 * 0.2 - 0.1 + ...
    batch = tokens_batch(REWARDS, GAPPED, [0], values=VALUES)
    found = advantages(GAE(gamma=0.9, lam=0.95), batch)
    assert batch.returns is not None
    assert batch.returns[0].tolist() == pytest.approx([0.755415, 0.873, 0, 1.0], rel=1e-5)
    assert found[0].tolist() == pytest.approx([0.330982, 0.792545, 0, -1.123526], rel=1e-4)


def test_reinforce_pp_by_hand() -> None:
    batch = tokens_batch(REWARDS, GAPPED, [0])
    found = advantages(ReinforcePP(gamma=0.9), batch)
    assert batch.returns is not None
    assert batch.returns[0].tolist() == pytest.approx([0.81, 0.9, 0, 1])
    # mean 0.903333, sample variance 0.009033
    assert found[0].tolist() == pytest.approx(
        [(x - 0.9033333) / 0.0950438 if x else 0 for x in (0.81, 0.9, 0, 1)], rel=1e-3
    )


def test_remax_by_hand() -> None:
    # token rewards of two turns: 0.5 in the middle, 1 at the end; the greedy answer got 0.25
    rewards = torch.tensor([[0.0, 0.5, 0, 1]])
    batch = tokens_batch(rewards, GAPPED, [0], greedy_rewards=torch.tensor([0.25]))
    assert advantages(ReMax(), batch)[0].tolist() == [1.25, 1.25, 0, 0.75]
    assert advantages(ReMax(gamma=0.5), batch)[0].tolist() == [0.25, 0.75, 0, 0.75]


def test_gdpo_by_hand() -> None:
    # each part by itself is +-0.707106 in its group; 1 * first + 2 * second = [+0.707, -0.707] and [-0.707 * 3, ...]
    components = torch.tensor([[1.0, 0.0, 9], [0.0, 1.0, 9], [0.0, 0.0, 9], [1.0, 1.0, 9]])
    batch = batch_of([0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], components=components, component_names=("a", "b", "c"))
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    raw = torch.tensor([unit - 2 * unit, -unit + 2 * unit, -3 * unit, 3 * unit])
    expected = (raw / (raw.var() + 1e-8).sqrt()).tolist()
    assert per_row(GDPO({"a": 1.0, "b": 2.0}), batch) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(
        RecipeError, match="weighs the component 'd', which the reward does not report; it reports: a, b, c"
    ):
        GDPO({"d": 1.0}).estimate(batch)


def test_optimal_token_baseline_by_hand() -> None:
    # two rows of 2 and 3 tokens with returns 1 and 0; pi = 1/2 and sum pi^2 = 1/2: w = 1 - 1 + 1/2, W = 0.5, 1, 1.5
    batch = batch_of(
        [1, 0], [0, 0], [2, 3], old_logps=torch.full((2, 5), math.log(0.5)), sum_pi_squared=torch.full((2, 5), 0.5)
    )
    # b_1 = (1 * 0.5 + 0 * 0.5) / 1 = 0.5, b_2 = 0.5; the third token has one row only
    expected = [[0, 0, 0.5, 0.5, 0], [0, 0, -0.5, -0.5, 0]]
    torch.testing.assert_close(advantages(OptimalTokenBaseline(), batch), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    # the longer row earns the return: its third token, which no other row has, keeps it whole
    longer = batch_of(
        [0, 1], [0, 0], [2, 3], old_logps=torch.full((2, 5), math.log(0.5)), sum_pi_squared=torch.full((2, 5), 0.5)
    )
    expected = [[0, 0, -0.5, -0.5, 0], [0, 0, 0.5, 0.5, 1]]
    torch.testing.assert_close(advantages(OptimalTokenBaseline(), longer), torch.tensor(expected), rtol=1e-5, atol=1e-6)
    # unequal confidence: row 0 surer (w = 0.1 a token), so the baseline leans to row 1's return
    batch.sum_pi_squared = torch.tensor([[0.1], [0.5]]).expand(2, 5)
    found = advantages(OptimalTokenBaseline(), batch)
    assert found[0, 2].item() == pytest.approx(1 - 0.1 / 0.6, rel=1e-5)


def test_optimal_token_baseline_passes_over_observations() -> None:
    plain = batch_of([1, 0], [0, 0], [2, 2], old_logps=torch.zeros(2, 4), sum_pi_squared=torch.full((2, 4), 2.0))
    rewards = torch.tensor([[0.0, 0, 0, 0, 1], [0, 0, 0, 0, 0]])
    mask = torch.tensor([[False, False, True, False, True], [False, False, True, True, False]])
    gapped = tokens_batch(rewards, mask, [0, 0], old_logps=torch.zeros(2, 5), sum_pi_squared=torch.full((2, 5), 2.0))
    found = advantages(OptimalTokenBaseline(), gapped)
    assert found[mask].tolist() == advantages(OptimalTokenBaseline(), plain)[plain.mask].tolist()


@pytest.mark.parametrize("estimator", GROUPED, ids=lambda e: type(e).__name__)
@given(reward=st.floats(-100, 100, width=32), size=st.integers(2, 6))
def test_equal_rewards_give_exactly_zero(estimator: AdvantageEstimator, reward: float, size: int) -> None:
    assert not advantages(estimator, batch_of([reward] * size, [3] * size, list(range(1, size + 1)))).any()


@pytest.mark.parametrize("estimator", GROUPED, ids=lambda e: type(e).__name__)
def test_a_group_of_one_gives_zero_before_whitening(estimator: AdvantageEstimator) -> None:
    found = advantages(estimator, batch_of([0.7, 1.0, 0.0], [0, 1, 1], [2, 2, 2]))
    if isinstance(estimator, ReinforcePPBaseline):
        assert found[0, 2].item() == pytest.approx(0, abs=1e-6)  # the mean of the centred rewards is 0 here
    else:
        assert not found[0].any()
    assert Needs.GROUPS in estimator.needs


@pytest.mark.parametrize("estimator", GROUPED, ids=lambda e: type(e).__name__)
@given(data=st.data())
def test_advantages_do_not_depend_on_the_order_of_rows(estimator: AdvantageEstimator, data: st.DataObject) -> None:
    rewards, groups, lengths = ([column[i] for i in range(7)] for column in GOLDEN)
    rewards = data.draw(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=7, max_size=7))
    order = data.draw(st.permutations(range(7)))
    if isinstance(estimator, PassK) and len(set(rewards)) < 3:
        return  # which of two equal best rows wins does not matter: both get 0
    plain = advantages(estimator, batch_of(rewards, groups, lengths))
    moved = advantages(estimator, batch_of(*([column[i] for i in order] for column in (rewards, groups, lengths))))
    torch.testing.assert_close(moved, plain[order], rtol=1e-5, atol=1e-6)


def test_turn_rewards_reach_outcome_estimators_as_their_sum() -> None:
    rewards = torch.tensor([[0.0, 0.5, 0, 0.5], [0.0, 0, 0, 0]])
    mask = torch.ones(2, 4, dtype=torch.bool)
    assert advantages(RLOO(), tokens_batch(rewards, mask, [0, 0]))[:, 0].tolist() == [1, -1]


def test_whiten_by_hand_and_with_too_little_to_whiten() -> None:
    mask = torch.tensor([True, True, False, True])
    found = whiten(torch.tensor([1.0, 2.0, math.nan, 6.0]), mask)  # mean 3, sample variance 7
    assert found.tolist() == pytest.approx([-2 / math.sqrt(7), -1 / math.sqrt(7), 0, 3 / math.sqrt(7)], rel=1e-6)
    two = whiten(torch.tensor([1.0, 3.0]), torch.ones(2, dtype=torch.bool))  # of variance 2
    assert two.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert whiten(torch.tensor([5.0, 3.0]), torch.tensor([True, False])).tolist() == [5, 0]
    assert "whitening needs at least 2 values" in str(seen[0].message)


def test_an_empty_batch_is_fine() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for estimator in [*GROUPED, ReinforcePP(), ReMax(), GDPO({"a": 1.0})]:
            empty = tokens_batch(
                torch.zeros(0, 0), torch.zeros(0, 0, dtype=torch.bool), [], greedy_rewards=torch.zeros(0)
            )
            assert advantages(estimator, empty).shape == (0, 0)


def test_options_out_of_range_are_refused() -> None:
    assert list(outside(GAE(gamma=1.5), "advantage")) == ["advantage.gamma is 1.5, expected a number from 0 to 1"]
    with pytest.raises(RecipeError, match="GDPO has no weights"):
        GDPO({})


class Measures(GRPO):
    """Adds a metric."""

    def __init__(self, name: str, value: object) -> None:
        super().__init__()
        self.metric = {name: value}

    def estimate(self, batch: Batch) -> None:
        super().estimate(batch)
        batch.metrics = self.metric  # type: ignore[assignment]


def two_rows() -> Batch:
    mask = torch.ones(2, 1, dtype=torch.bool)
    return tokens_batch(torch.tensor([[0.0], [1.0]]), mask, [0, 0])


def test_metrics_that_an_estimator_adds_are_read_only_afterwards() -> None:
    batch = two_rows()
    credit.estimate(Measures("spread", torch.tensor(0.5)), batch)
    assert batch.metrics == {"spread": 0.5}
    with pytest.raises(TypeError, match="does not support item assignment"):
        batch.metrics["late"] = 1.0  # type: ignore[index]


@pytest.mark.parametrize(("name", "value"), [("max", 1.0), ("a", float("inf")), ("a", None), ("a b", 1.0)])
def test_an_estimators_metric_must_be_a_new_number(name: str, value: object) -> None:
    with pytest.raises(PartError, match=f"^Measures of tests: `estimate` added .*{name}"):
        credit.estimate(Measures(name, value), two_rows())
