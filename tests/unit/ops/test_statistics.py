"""Intervals, pass@k, majorities and paired tests."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlkit_report.agreement import rank_correlation

from rlkit.ops.statistics import (
    Moments,
    bootstrap,
    majority,
    paired_p_value,
    pass_at_k,
    repeated_ngrams,
    sign_test,
    wilson,
)


def test_wilson_by_hand() -> None:
    """For 8 of 10: (0.8 + 3.8415/20 -+ 1.96 sqrt(0.16/10 + 3.8415/400)) / 1.38415."""
    low, high = wilson(8, 10)
    assert low == pytest.approx(0.49016, abs=1e-5)
    assert high == pytest.approx(0.94332, abs=1e-5)
    assert wilson(0, 10).low == 0
    assert wilson(10, 10).high == 1
    assert wilson(0, 0) == (0, 1)


@pytest.mark.parametrize("share", [0.05, 0.5, 0.93])
def test_wilson_covers_the_true_share_in_about_95_of_100_runs(share: float) -> None:
    counts = torch.binomial(torch.full((4000,), 100.0), torch.tensor(share), generator=torch.Generator().manual_seed(0))
    held = sum(low <= share <= high for low, high in (wilson(int(c), 100) for c in counts))
    assert 0.93 <= held / 4000 <= 0.975


def test_bootstrap_covers_the_true_mean_over_prompts() -> None:
    """Each prompt has a difficulty of its own and four samples: intervals by samples alone would hold it in 82%."""
    generator = torch.Generator().manual_seed(1)
    held = 0
    for i in range(300):
        difficulty = torch.rand(60, generator=generator)
        right = torch.bernoulli(difficulty[:, None].expand(-1, 4), generator=generator)
        low, high = bootstrap(right.mean(1).tolist(), seed=i)
        held += low <= 0.5 <= high
    assert 0.91 <= held / 300 <= 0.98


def test_bootstrap_of_nothing_and_of_one_value() -> None:
    assert all(map(math.isnan, bootstrap([])))
    assert bootstrap([0.25]) == (0.25, 0.25)
    assert bootstrap([0.0, 1.0, 1.0]) == bootstrap([0.0, 1.0, 1.0])


@given(st.integers(1, 8), st.data())
def test_pass_at_k_is_that_of_all_choices(samples: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, samples))
    k = data.draw(st.integers(1, samples))
    choices = list(combinations([i < right for i in range(samples)], k))
    assert pass_at_k(samples, right, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_of_too_few_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="pass@4 of 3 samples, expected at least 4"):
        pass_at_k(3, 1, 4)


@pytest.mark.parametrize(
    ("answers", "right", "share"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),
        (["7", "8", "9", "9", "8"], [False, True, False, False, True], 0.5),
        ([None, None, "7"], [False, False, True], 1.0),
        ([None, None], [False, False], 0.0),
    ],
)
def test_majorities(answers: list[str | None], right: list[bool], share: float) -> None:
    assert majority(answers, right) == share


def test_sign_test_by_hand() -> None:
    """Of 5 pairs that differ all are better: 2 / 32; of 8, 7: 2 (1 + 8) / 256."""
    assert sign_test(5, 0) == pytest.approx(0.0625)
    assert sign_test(1, 7) == pytest.approx(18 / 256)
    assert sign_test(0, 0) == sign_test(3, 3) == 1.0


def test_a_paired_p_value_is_that_of_all_signs() -> None:
    """Of the 2^10 signs of ten equal differences, two make the sum as large; where half are negative, all do."""
    assert paired_p_value([0.5] * 10) == pytest.approx(2 / 1024, abs=1.5e-3)
    assert paired_p_value([0.5] * 5 + [-0.5] * 5) == 1.0
    assert paired_p_value([0.0] * 10) == paired_p_value([]) == 1.0


def test_paired_p_values_are_uniform_where_nothing_differs() -> None:
    generator = torch.Generator().manual_seed(2)
    found = [paired_p_value(torch.randn(30, generator=generator).tolist(), seed=i) for i in range(300)]
    assert 0.02 <= sum(p <= 0.05 for p in found) / 300 <= 0.09


def correlation(x: list[float], y: list[float]) -> float:
    return Moments.from_pairs(x, y).correlation


def test_correlations_by_hand() -> None:
    """About the means (-1, 0, 1) and (-2, -1, 3): 5 / sqrt(2 * 14).

    Ranks 1, 2.5, 2.5, 4 and 1, 3, 2, 4, about their mean: 4.5 / sqrt(4.5 * 5).
    """
    assert correlation([1, 2, 3], [0, 1, 5]) == pytest.approx(5 / math.sqrt(28))
    assert correlation([1, 2], [7, 3]) == pytest.approx(-1)
    assert rank_correlation([1, 5, 5, 90], [0.1, 0.3, 0.2, 0.4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert rank_correlation([1, 2, 3], [1, 100, 10_000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [0, -9, -10]) == pytest.approx(-1)


@pytest.mark.parametrize("constant", [0.0, 0.1, 1e9 + 0.1, -3e-9])
def test_what_is_constant_has_no_correlation(constant: float) -> None:
    assert math.isnan(correlation([constant] * 7, list(range(7))))
    assert math.isnan(rank_correlation(list(range(7)), [constant] * 7))
    assert math.isnan(correlation([], []))
    assert math.isnan(correlation([constant], [2.0]))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=2))
def test_a_correlation_is_symmetric_and_within_its_bounds(pairs: list[tuple[float, float]]) -> None:
    x, y = [a for a, _ in pairs], [b for _, b in pairs]
    for one in (correlation, rank_correlation):
        value = one(x, y)
        assert math.isnan(value) or -1 <= value <= 1
        assert one(y, x) == pytest.approx(value, nan_ok=True)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=12), st.integers(0, 12))
def test_the_sums_of_two_parts_are_those_of_the_whole(pairs: list[tuple[int, int]], cut: int) -> None:
    def of(some: list[tuple[int, int]]) -> Moments:
        return Moments.from_pairs([a for a, _ in some], [b for _, b in some])

    assert of(pairs[:cut]).plus(of(pairs[cut:])) == of(pairs)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([], (0, 0)),
        ([1, 1, 1], (0, 0)),
        ([1, 2, 3, 4], (0, 1)),
        ([1] * 7, (3, 4)),  # 1111 four times, of which three again
        ([1, 2, 3, 4, 5, 1, 2, 3, 4], (1, 6)),
    ],
)
def test_repetitions_by_hand(tokens: list[int], found: tuple[int, int]) -> None:
    assert repeated_ngrams(tokens) == found
