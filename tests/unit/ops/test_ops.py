"""The pure tensor functions, against numbers worked by hand and independent references."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlkit_engine_torch.sampling import Truncation, choose, truncate

from rlkit.ops import aggregate, kl
from rlkit.ops.batching import micro_batches
from rlkit.ops.groups import group_stats
from rlkit.ops.logps import ALL, DEFAULT_READS, LOGPS, WEIGHT_ROWS, OutputLayer, _add_outer_, logits_logps, token_logps
from rlkit.ops.masked import masked_mean, masked_sum
from rlkit.ops.random import uniform
from rlkit.types import Reads


def splitmix64(key: int, counter: int) -> float:
    """The generator in 64-bit unsigned arithmetic, as published."""
    bits = (1 << 64) - 1
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & bits
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & bits
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & bits
    z ^= z >> 31
    return ((z >> 11) + 0.5) / 2**53


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 100_000))
def test_uniform_is_splitmix64(key: int, counter: int) -> None:
    assert uniform(torch.tensor([key]), torch.tensor([counter])).item() == splitmix64(key, counter)


def test_uniform_is_uniform() -> None:
    u = uniform(torch.arange(200).repeat_interleave(500), torch.arange(500).repeat(200)).numpy()
    counts, _ = np.histogram(u, bins=50, range=(0, 1))
    # chi-square with 49 degrees of freedom: 99.99% lie below 95
    assert ((counts - 2000) ** 2 / 2000).sum() < 95
    assert u.min() > 0
    assert u.max() < 1


def pick(logits: torch.Tensor, u: torch.Tensor, temperature: float = 1.0, **limits: float):
    n = len(u)
    truncation = Truncation(*(torch.full((n,), limits.get(key, value)) for key, value in KEEP_ALL.items()))
    return choose(logits.expand(n, -1), u, torch.full((n,), temperature), truncation)[:2]


KEEP_ALL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}


@pytest.mark.parametrize("vocabulary", [7, 1500])
@pytest.mark.parametrize("options", [{}, {"temperature": torch.zeros(6)}, {"temperature": torch.full((6,), 0.5)}])
def test_rows_that_are_not_finite_have_any_token_and_no_log_prob(vocabulary: int, options: dict[str, Any]) -> None:
    """Of NaN, of infinity, of both, and of minus infinity alone; the last two rows are fine, one of them masked."""
    logits = torch.randn(6, vocabulary, generator=torch.Generator().manual_seed(0))
    logits[0, 2] = logits[2, 1] = math.nan
    logits[1, 3] = logits[2, 4] = math.inf
    logits[3], logits[5, 2:] = -math.inf, -math.inf
    u = torch.full((6,), 1 - 2.0**-53, dtype=torch.float64)
    for truncation in (None, Truncation(torch.full((6,), 0.9), torch.full((6,), 3), torch.zeros(6))):
        tokens, logps, _ = choose(logits, u, **options, truncation=truncation)
        assert tokens.min() >= 0
        assert tokens.max() < vocabulary
        assert logps.isfinite().tolist() == [False] * 4 + [True] * 2
        alone = choose(logits[4:], u[4:], *(x[4:] for x in options.values()), truncation=of_rows(truncation, 4))
        assert torch.equal(tokens[4:], alone[0])
        torch.testing.assert_close(logps[4:], alone[1])


def of_rows(truncation: Truncation | None, start: int) -> Truncation | None:
    return None if truncation is None else Truncation(*(x[start:] for x in truncation))


def test_choose_follows_the_distribution_and_gives_its_logps() -> None:
    logits = torch.tensor([2.0, 0.0, 1.0, -1.0])
    u = (torch.arange(10_000) + 0.5) / 10_000
    tokens, logps = pick(logits, u, temperature=0.5)
    expected = torch.softmax(logits / 0.5, 0)
    torch.testing.assert_close(tokens.bincount(minlength=4) / 10_000, expected, atol=2e-4, rtol=0)
    torch.testing.assert_close(logps, expected.log()[tokens])


@pytest.mark.parametrize(("vocabulary", "draws"), [(11, 100_000), (512, 60_000), (151_936, 2048)])
def test_frequencies_are_those_of_the_distribution_to_its_tails(vocabulary: int, draws: int) -> None:
    """Logits fall by 20 from the first token to the last, in shuffled order; the least likely are counted together."""
    order = torch.randperm(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    logits = torch.linspace(0, -20, vocabulary)[order]
    u = uniform(torch.arange(draws), torch.tensor(vocabulary))
    found = torch.cat([choose(logits.expand(len(part), -1), part)[0] for part in u.split(max(1, 2**22 // vocabulary))])
    exact = logits.double().softmax(-1)
    after = exact.cumsum(0)[found]  # it is the inverse of the cumulative distribution, to what float32 weights allow
    assert (u <= after + 1e-7).all()
    assert (u >= after - exact[found] - 1e-7).all()
    rank = logits.argsort()  # the least likely first
    bins = (exact[rank].cumsum(0) * draws / 20).floor().long()  # about 20 draws each
    expected = torch.zeros(draws // 20 + 1, dtype=torch.float64).index_add_(0, bins, exact[rank]) * draws
    counted = torch.zeros_like(expected).index_add_(0, bins, found.bincount(minlength=vocabulary)[rank].double())
    real = expected > 0.5
    statistic = float(((counted - expected)[real] ** 2 / expected[real]).sum())
    freedom = int(real.sum()) - 1
    assert freedom >= 5
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom)  # 99.99% of independent draws are as close


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    """Of 1/2, 1/4, 1/8 and 1/8, in any order, one reaches 0.5, two reach 0.75, and three 0.76."""
    probs = torch.tensor([0.125, 0.5, 0.125, 0.25]).expand(4, -1)
    limits = Truncation(torch.tensor([0.5, 0.75, 0.76, 1.0]), torch.zeros(4, dtype=torch.long), torch.zeros(4))
    found = truncate(probs, limits)
    assert (found > 0).sum(-1).tolist() == [1, 2, 3, 4]
    assert found[0].tolist() == [0, 0.5, 0, 0]


def test_choose_truncates_but_reports_the_full_softmax() -> None:
    logits = torch.tensor([0.5, 0.25, 0.15, 0.1]).log()
    u = (torch.arange(1000) + 0.5) / 1000
    assert set(pick(logits, u, top_k=2)[0].tolist()) == {0, 1}
    # 0.5 + 0.25 reaches 0.7, so the third token is out
    tokens, logps = pick(logits, u, top_p=0.7)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logps, logits[tokens])


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"min_p": 0.0}, {0, 1, 2, 3}),
        ({"min_p": 0.25}, {0, 1, 2}),  # at least 0.25 * 0.5 = 0.125
        ({"min_p": 0.31}, {0, 1}),  # at least 0.155
        ({"min_p": 0.51}, {0}),  # at least 0.255
        ({"min_p": 1.0}, {0}),
        ({"min_p": 0.25, "top_k": 2}, {0, 1}),
        ({"min_p": 0.31, "top_p": 0.4}, {0}),
        ({"min_p": 0.31, "temperature": 2.0}, {0, 1, 2, 3}),  # roots: 0.71, 0.5, 0.39, 0.32, all above 0.31 * 0.71
    ],
)
def test_min_p_keeps_what_is_near_the_most_likely_token(limits: dict[str, float], kept: set[int]) -> None:
    probs = torch.tensor([0.15, 0.5, 0.1, 0.25])
    order = [1, 3, 0, 2]  # from the most likely token
    u = (torch.arange(4000) + 0.5) / 4000
    tokens, logps = pick(probs.log(), u, **limits)
    assert set(tokens.tolist()) == {order[rank] for rank in kept}
    whole = torch.log_softmax(probs.log() / limits.get("temperature", 1.0), 0)
    torch.testing.assert_close(logps, whole[tokens])
    left = whole.exp() * torch.tensor([float(order.index(token) in kept) for token in range(4)])
    torch.testing.assert_close(tokens.bincount(minlength=4) / 4000, left / left.sum(), atol=1e-3, rtol=0)


def test_temperature_zero_takes_the_first_of_the_largest() -> None:
    tokens, logps = pick(torch.tensor([0.0, 3.0, 3.0]), torch.tensor([0.99]), temperature=0.0)
    assert tokens.item() == 1
    assert logps.item() == pytest.approx(-math.log(2 + math.exp(-3)))


def test_group_stats_by_hand() -> None:
    # group 7: 1, 0, 0, 1 -> mean 1/2, sample std sqrt(4 * 1/4 / 3); group 2: one value; group 5: equal values
    stats = group_stats(torch.tensor([1.0, 0.5, 0, 0.95, 0, 1, 0.95]), torch.tensor([7, 2, 7, 5, 7, 7, 5]))
    assert stats.size.tolist() == [4, 1, 4, 2, 4, 4, 2]
    torch.testing.assert_close(stats.mean, torch.tensor([0.5, 0.5, 0.5, 0.95, 0.5, 0.5, 0.95]))
    s = math.sqrt(1 / 3)
    torch.testing.assert_close(stats.std, torch.tensor([s, 0, s, 0, s, s, 0]))
    assert stats.equal.tolist() == [False, True, False, True, False, False, True]


def test_masked_values_outside_do_not_count() -> None:
    x = torch.tensor([1.0, math.nan, 3.0, math.inf])
    mask = torch.tensor([True, False, True, False])
    assert masked_sum(x, mask).item() == 4
    assert masked_mean(x, mask).item() == 2
    assert masked_mean(x, torch.zeros(4, dtype=torch.bool)).item() == 0
    # over two ranks with the same values: (4 + 4) / (2 + 2)
    assert masked_mean(x, mask, lambda t: 2 * t).item() == 2


MASK = torch.tensor([[False, True, True, True], [False, True, False, False], [False, False, False, False]])
X = torch.tensor([[9.0, 1, 2, 3], [9, 4, 9, 9], [9, 9, 9, 9]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_mean", 10 / 4),
        ("token_sum", 10.0),
        ("seq_mean_token_mean", (2 + 4) / 2),
        ("seq_mean_token_sum", (6 + 4) / 2),
        ("seq_mean_token_sum_norm", (6 + 4) / 2 / 8),
        ("prompt_mean_token_mean", (6 / 3 + 4 / 1) / 2),  # each row another prompt's, the last one's has no tokens
    ],
)
def test_aggregation_by_hand(mode: aggregate.Aggregation, expected: float) -> None:
    tokens = torch.tensor([[6.0], [2], [0]]) if mode == "prompt_mean_token_mean" else 4
    weights = aggregate.weights(MASK, mode, tokens=tokens, sequences=2, budget=8)
    assert (X * weights).sum().item() == pytest.approx(expected)


def test_aggregation_without_its_count_says_which() -> None:
    with pytest.raises(ValueError, match="token_mean divides by `tokens`"):
        aggregate.weights(MASK, "token_mean")


@pytest.mark.parametrize(
    ("kind", "d", "value", "slope"),
    [
        ("k1", 0.5, 0.5, 1.0),
        ("k2", 0.5, 0.125, 0.5),
        ("k3", 0.5, math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),  # 0.106531
        ("k1", -0.5, -0.5, 1.0),
        ("k3", -0.5, math.exp(0.5) - 0.5 - 1, 1 - math.exp(0.5)),  # 0.148721
        ("abs", -0.5, 0.5, -1.0),
        ("k1+", -0.5, -0.5, -0.5),
        ("k3+", 0.5, math.exp(-0.5) + 0.5 - 1, 0.5),
        ("abs+", -0.5, 0.5, -0.5),
        ("k2+", -0.5, 0.125, -0.5),
        ("k3", -25.0, 10.0, 0.0),  # clamped, where the gradient ends
    ],
)
def test_kl_by_hand(kind: kl.KLEstimator, d: float, value: float, slope: float) -> None:
    logps = torch.tensor([d - 1.0], requires_grad=True)
    estimate = kl.estimate(logps, torch.tensor([-1.0]), kind)
    (gradient,) = torch.autograd.grad(estimate, logps)
    assert estimate.item() == pytest.approx(value, rel=1e-5)
    assert gradient.item() == pytest.approx(slope, rel=1e-5)


def test_a_weighted_kl_by_hand() -> None:
    """pi is e^0.2 of pi_old and e^-0.5 of the reference: w k3 with w = e^0.2, d = -0.5; d/dlogp w (k3 + k3')."""
    logps = torch.tensor([-1.0], requires_grad=True)
    found = kl.importance_weighted(kl.estimate(logps, torch.tensor([-0.5])), logps, torch.tensor([-1.2]))
    (gradient,) = torch.autograd.grad(found, logps)
    k3, slope = math.exp(0.5) - 0.5 - 1, 1 - math.exp(0.5)
    assert found.item() == pytest.approx(math.exp(0.2) * k3, rel=1e-5)
    assert gradient.item() == pytest.approx(math.exp(0.2) * (k3 + slope), rel=1e-5)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_a_weighted_kl_is_unbiased_off_policy(kind: kl.KLEstimator) -> None:
    """Three tokens, all possible samples weighted by pi_old: value and gradient are those of the exact KL."""
    logits = torch.tensor([0.3, -0.2, 0.9], requires_grad=True)
    old, reference = (torch.tensor(x).log_softmax(0) for x in ([1.0, 0.0, -1.0], [0.0, 0.5, 0.2]))
    logps = logits.log_softmax(0)
    mean = (old.exp() * kl.importance_weighted(kl.estimate(logps, reference, kind), logps, old)).sum()
    exact = (logps.exp() * (logps - reference)).sum()
    torch.testing.assert_close(mean, exact)
    torch.testing.assert_close(torch.autograd.grad(mean, logits, retain_graph=True), torch.autograd.grad(exact, logits))
    plain = (old.exp() * kl.estimate(logps, reference, kind)).sum()
    assert abs(plain - exact) > 0.01


@given(st.lists(st.integers(0, 300), max_size=60), st.integers(1, 500))
def test_micro_batches_hold_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    batches = micro_batches(lengths, budget)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(1, *(lengths[i] for i in batch)) <= budget


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 6)), max_size=60), st.integers(1, 500))
def test_micro_batches_of_whole_groups(rows: list[tuple[int, int]], budget: int) -> None:
    lengths, groups = [length for length, _ in rows], [group for _, group in rows]
    batches = micro_batches(lengths, budget, groups)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for group in set(groups):
        assert sum(any(groups[i] == group for i in batch) for batch in batches) == 1
    for batch in batches:
        alone = len({groups[i] for i in batch}) == 1
        assert alone or len(batch) * max(1, *(lengths[i] for i in batch)) <= budget


def test_a_group_larger_than_the_budget_is_a_micro_batch() -> None:
    """Group 0 takes 3 x 4 tokens, groups 1 and 2 take 4 x 2 together."""
    lengths, groups = [4, 2, 1, 3, 1, 2, 2], [0, 1, 0, 0, 1, 2, 2]
    assert micro_batches(lengths, 8, groups) == [[0, 3, 2], [1, 4, 5, 6]]
    assert micro_batches(lengths, 7, groups) == [[0, 3, 2], [1, 4], [5, 6]]


def test_micro_batches_take_the_longest_rows_first() -> None:
    """Rows of 3 and 2 take 2 x 3, and 2, 2 and 1 take 3 x 2."""
    assert micro_batches([2, 3, 1, 2, 2], 6) == [[1, 0], [3, 4, 2]]
    assert micro_batches([2, 3, 1, 2, 2], 5) == [[1], [0, 3], [4, 2]]


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 40), st.integers(2, 50), st.sampled_from([0.7, 1.0, 1.3]), st.booleans())
def test_token_logps_equal_log_softmax_with_gradients(
    n: int, vocabulary: int, temperature: float, biased: bool
) -> None:
    generator = torch.Generator().manual_seed(n * 100 + vocabulary)
    hidden = torch.randn(n, 8, generator=generator, dtype=torch.float64).float().requires_grad_()
    weight = torch.randn(vocabulary, 8, generator=generator).requires_grad_()
    bias = torch.randn(vocabulary, generator=generator).requires_grad_() if biased else None
    targets = torch.randint(vocabulary, (n,), generator=generator)
    pull = torch.randn(2, n, generator=generator)
    leaves = [hidden, weight] + ([] if bias is None else [bias])
    results = []
    for logps, entropy, *_ in (
        token_logps(hidden, OutputLayer(weight, bias, temperature), targets),
        logits_logps(torch.nn.functional.linear(hidden, weight, bias), targets, temperature),
    ):
        gradients = torch.autograd.grad((pull[0] * logps + pull[1] * entropy).sum(), leaves)
        results.append((logps, entropy, *gradients))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)


def test_token_logps_in_several_chunks() -> None:
    hidden = torch.randn(10, 4, requires_grad=True)
    weight = torch.randn(20, 4, requires_grad=True)  # chunks of three rows
    targets = torch.arange(10)
    found = token_logps(hidden, OutputLayer(weight), targets, memory=240)
    expected = logits_logps(hidden @ weight.T, targets)
    torch.testing.assert_close(found[:4], expected[:4])
    assert found.entropy is not None
    assert expected.entropy is not None
    ours = torch.autograd.grad((found.logps * found.entropy).sum(), weight)
    plain = torch.autograd.grad((expected.logps * expected.entropy).sum(), weight)
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


def test_logits_are_computed_in_blocks_that_fit_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 logits of 20 tokens take 80 bytes: 240 bytes hold three rows."""
    rows: list[int] = []

    def product(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return torch.nn.functional.linear(hidden, *others)

    monkeypatch.setattr("rlkit.ops.logps.product", product)
    token_logps(torch.zeros(10, 4), OutputLayer(torch.zeros(20, 4)), torch.arange(10), memory=240)
    assert rows == [3, 3, 3, 1]


def test_logits_are_kept_in_as_much_memory_as_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass computes none again, and hooks that move what is saved to a host move no logits."""
    rows: list[int] = []
    moved: list[tuple[int, ...]] = []
    monkeypatch.setattr("rlkit.ops.logps.CHUNK_BYTES", 240)
    monkeypatch.setattr(
        "rlkit.ops.logps.product", lambda x, *others: (rows.append(len(x)), torch.nn.functional.linear(x, *others))[1]
    )
    hidden, weight = (torch.zeros(*shape, requires_grad=True) for shape in ((10, 4), (20, 4)))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (moved.append(tuple(x.shape)), x)[1], lambda x: x):
        logps = token_logps(hidden, OutputLayer(weight), torch.arange(10), memory=800).logps
    logps.sum().backward()
    assert rows == [10, 10]  # the second is the gradient of hidden states
    assert (10, 20) not in moved


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("reads", [ALL, Reads(top=3)])
def test_products_of_onednn_have_few_numbers_of_rows(
    reads: Reads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 rows become 128, with the statistics and gradients of 100; up to 64 rows stay as they are."""
    rows: list[int] = []

    def product(hidden: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return torch.nn.functional.linear(hidden, *others)

    monkeypatch.setattr("rlkit.ops.logps.product", product)
    monkeypatch.setattr("rlkit.ops.logps.outpaces_mkl", lambda: True)
    hidden, weight = (torch.randn(n, 8, dtype=dtype, requires_grad=True) for n in (100, 20))
    targets, results = torch.arange(100) % 20, []
    for size in (64, 100):
        monkeypatch.setattr("rlkit.ops.logps.ROWS", size)
        found = token_logps(hidden, OutputLayer(weight), targets, reads=reads)
        differentiable = [x for x in (found.logps, found.entropy, found.mean, found.top) if x is not None]
        gradients = torch.autograd.grad(sum((x * x).sum() for x in differentiable), (hidden, weight))
        results.append([*(x for x in found if x is not None), *gradients])
    assert rows == [128, 128, 100, 100]  # forwards and backwards
    for padded, plain in zip(*results, strict=True):
        assert (padded - plain).float().norm() <= 1e-5 * plain.float().norm()


def test_statistics_that_are_not_read_are_not_returned() -> None:
    def returned(reads: Reads) -> set[str]:
        found = token_logps(torch.zeros(2, 3), OutputLayer(torch.zeros(5, 3)), torch.tensor([0, 4]), reads=reads)
        return {name for name, value in found._asdict().items() if value is not None}

    assert returned(LOGPS) == {"logps"}
    assert returned(DEFAULT_READS) == {"logps", "entropy"}
    assert returned(ALL) == {"logps", "entropy", "squares", "mean"}
    assert returned(Reads(entropy=False, top=2)) == {"logps", "ids", "top"}


def test_half_precision_gradients_add_up_in_float32() -> None:
    """1 + [[1, 2], [3, 4]].T @ [[1, 1], [2, 2]] = 1 + [[7, 7], [10, 10]]; rows beyond a block are added too."""
    left, right = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).bfloat16(), torch.tensor([[1.0, 1.0], [2.0, 2.0]]).bfloat16()
    total = torch.ones(2, 2)
    _add_outer_(total, left, right)
    assert total.tolist() == [[8.0, 8.0], [11.0, 11.0]]
    wide, long = torch.ones(1, WEIGHT_ROWS + 1).bfloat16(), torch.zeros(WEIGHT_ROWS + 1, 1)
    _add_outer_(long, wide, torch.full((1, 1), 3.0).bfloat16())
    assert long.unique().tolist() == [3.0]
