"""Packed attention with torch's own kernels, which GPUs use: the same values and gradients as on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from rlkit.models import attention
from rlkit.models.actor import Actor
from rlkit.ops.attention import Layout, Scoring, packed_attention
from rlkit.ops.ragged import KeyCopies, by_flash, by_sdpa, copies_of, ragged_attention, ragged_of
from rlkit.testing import random_model
from tests.unit.models.test_packing import rows_of

CPU = torch.device("cpu")
Attend = Callable[[Tensor, Tensor, Tensor, Scoring, Layout], Tensor]


def attend_to_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    *most: int,
    enable_gqa: bool = False,
    **options: Any,
) -> Tensor:
    """Attend as `varlen_attn` states that it does, segment by segment."""
    before, after = options["window_size"]
    assert after == 0
    assert enable_gqa or query.shape[1] == key.shape[1] == value.shape[1]
    assert query_starts.dtype == key_starts.dtype == torch.int32
    assert most == (int(query_starts.diff().max()), int(key_starts.diff().max()))
    assert int(key_starts[-1]) == len(key) == len(value)
    found = []
    for (start, end), (first, last) in zip(
        query_starts.unfold(0, 2, 1).tolist(), key_starts.unfold(0, 2, 1).tolist(), strict=True
    ):
        k, v = (x[first:last].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], k) * options["scale"]
        seen = torch.ones(end - start, last - first, dtype=torch.bool, device=query.device)
        seen = seen.tril(last - first - end + start)
        if before >= 0:
            seen = seen.triu(last - first - end + start - before)
        found.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v))
    return torch.cat(found)


def attend_as_in_torch_2_11(  # noqa: PLR0917 (the order of torch)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: None = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """Attend by the signature of torch 2.11, which wants a head of keys for each of queries."""
    return attend_to_each(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size)


@contextmanager
def reference(attend: Callable[..., Tensor] = attend_to_each) -> Iterator[None]:
    kernel, varlen.varlen_attn = varlen.varlen_attn, attend  # type: ignore[assignment]
    try:
        yield
    finally:
        varlen.varlen_attn = kernel


def layout_of(groups: list[tuple[int, list[int]]]) -> Layout:
    """Lay out groups: a prompt's length, 0 for none, and those of the segments that attend to it."""
    segments, shared, end = [], [], 0
    for prompt, rows in groups:
        begin = end
        for length in ([prompt] if prompt else []) + rows:
            segments.append((end, end + length))
            end += length
        if prompt:
            shared.append((begin, begin + prompt, end))
    return Layout(segments, shared, CPU)


def test_where_keys_are_by_hand() -> None:
    """A prompt of 2 tokens with segments of 1 and 2 tokens, and a segment of 2 alone."""
    layout = layout_of([(2, [1, 2]), (0, [2])])
    found = ragged_of(layout)
    assert copies_of(layout)[0].tolist() == [0, 1, *(0, 1, 2), *(0, 1, 3, 4), *(5, 6)]
    assert found.query_starts.tolist() == [0, 2, 3, 5, 7]
    assert found.key_starts.tolist() == [0, 2, 5, 9, 11]
    assert (found.max_queries, found.max_keys) == (2, 4)


def test_copies_of_keys_by_hand() -> None:
    """Token 0 of the prompt is the keys 0, 2 and 5, token 1 the keys 1, 3 and 6; a prompt of 1 has 2 copies of 3."""
    _, first, repeated, copies, is_copy = (x.tolist() for x in copies_of(layout_of([(2, [1, 2]), (1, [1])])))
    assert first == [0, 1, 4, 7, 8, 9, 11]
    assert repeated == [0, 1, 5]
    assert [row[:count] for row, count in zip(copies, (3, 3, 2), strict=True)] == [[0, 2, 5], [1, 3, 6], [9, 10]]
    assert is_copy == [[[1, 1, 1]], [[1, 1, 1]], [[1, 1, 0]]]


def test_the_gradient_of_copied_keys_is_rounded_once() -> None:
    """In bfloat16, as the sum in float32 of the gradients of all copies."""
    layout = layout_of([(5, [3, 1, 4]), (0, [2]), (2, [6])])
    key = torch.randn(23, 2, 4).bfloat16().requires_grad_()
    found = KeyCopies.apply(key, layout)  # type: ignore[no-untyped-call]
    keys, grad = copies_of(layout)[0], torch.randn(found.shape).bfloat16()
    assert torch.equal(found, key[keys])
    found.backward(grad)
    assert key.grad is not None
    assert torch.equal(key.grad, torch.zeros(key.shape).index_add_(0, keys, grad.float()).bfloat16())


GROUPS = st.lists(
    st.tuples(st.integers(0, 9), st.lists(st.integers(1, 12), min_size=1, max_size=4)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=30)
@given(GROUPS, st.sampled_from([(4, 4), (4, 2), (3, 1)]))
def test_values_and_gradients_are_those_of_the_kernels_for_cpus(
    groups: list[tuple[int, list[int]]], heads: tuple[int, int]
) -> None:
    layout = layout_of(groups)
    length = layout.segments[-1][1]

    def values_and_gradients(attend: Attend) -> list[Tensor]:
        torch.manual_seed(0)
        inputs = [torch.randn(length, n, 8, requires_grad=True) for n in (heads[0], heads[1], heads[1])]
        found = attend(*inputs, Scoring(0.3), layout)  # type: ignore[call-arg, arg-type]
        (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
        return [found, *(x.grad for x in inputs if x.grad is not None)]

    expected = values_and_gradients(packed_attention)
    found = [values_and_gradients(by_sdpa)]
    for kernel in (attend_to_each, attend_as_in_torch_2_11):
        with reference(kernel):
            found.append(values_and_gradients(by_flash))
    for others in found:
        for one, like in zip(others, expected, strict=True):
            torch.testing.assert_close(one, like, rtol=1e-4, atol=1e-5)


def attend_by_hand(inputs: list[Tensor], layout: Layout, window: int, softcap: float | None) -> Tensor:
    """Attend token by token in float64, with a scale of 0.3; the last input is the sinks, or None."""
    query, key, value, sinks = (None if x is None else x.double() for x in inputs)
    assert query is not None
    assert key is not None
    assert value is not None
    outputs = []
    for (start, end), prompt in zip(layout.segments, layout.prompts, strict=True):
        for token in range(start, end):
            seen = [*range(*prompt), *range(start, token + 1)][-window:]
            k, v = (x[seen].repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
            scores = torch.einsum("hd,khd->hk", query[token], k) * 0.3
            scores = scores if softcap is None else (scores / softcap).tanh() * softcap
            scores = scores if sinks is None else torch.cat((scores, sinks[:, None]), -1)
            outputs.append(torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : len(seen)], v))
    return torch.stack(outputs)


@settings(deadline=None, max_examples=40)
@given(
    GROUPS,
    st.sampled_from([(4, 4, 8, 8), (4, 2, 12, 8), (3, 1, 4, 8)]),
    st.sampled_from([1, 2, 3, 5, 8, 99]),
    st.booleans(),
    st.sampled_from([None, 0.5]),
)
def test_windows_sinks_soft_caps_and_wide_heads_by_hand(
    groups: list[tuple[int, list[int]]],
    shape: tuple[int, int, int, int],
    window: int,
    has_sinks: bool,
    softcap: float | None,
) -> None:
    """With 4, 4 or 3 heads of queries and 4, 2 or 1 of keys, whose sizes are those of values, larger or smaller."""
    layout = layout_of(groups)
    heads, key_heads, size, value_size = shape
    length = layout.segments[-1][1]

    def values_and_gradients(attend: Callable[[list[Any]], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        shapes = [(length, heads, size), (length, key_heads, size), (length, key_heads, value_size)]
        inputs = [torch.randn(shape, requires_grad=True) for shape in shapes]
        sinks = torch.randn(heads, requires_grad=True) if has_sinks else None
        output = attend([*inputs, sinks])
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum().backward()
        return [output.float(), *(x.grad for x in (*inputs, sinks) if x is not None and x.grad is not None)]

    expected = values_and_gradients(lambda x: attend_by_hand(x, layout, window, softcap))
    functions: list[Callable[[list[Any]], Tensor]] = [
        lambda x: ragged_attention(*x[:3], Scoring(0.3, window, x[3], softcap), layout)
    ]
    if softcap is None:
        functions.append(lambda x: packed_attention(*x[:3], Scoring(0.3, window, x[3]), layout))
    for function in functions:
        for actual, like in zip(values_and_gradients(function), expected, strict=True):
            torch.testing.assert_close(actual, like, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 3, 6, 50])
def test_windows_of_flash_attention(window: int) -> None:
    layout = layout_of([(7, [3, 9]), (0, [11])])
    torch.manual_seed(0)
    inputs = [torch.randn(layout.segments[-1][1], 4, 8) for _ in range(3)]
    expected = packed_attention(*inputs, Scoring(0.3, window), layout)  # type: ignore[misc]
    with reference():
        actual = by_flash(*inputs, Scoring(0.3, window), layout)  # type: ignore[misc]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attend", [by_flash, by_sdpa])
def test_a_model_that_attends_by_it_is_the_same(attend: Attend, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, mask = rows_of([7, 4, 1], [[3, 9, 1], [2, 2], [5]], 0)
    module, found = Actor(random_model("qwen2")), []
    for one in (packed_attention, attend):
        monkeypatch.setattr(attention, "packed_attention", one)
        module.zero_grad()
        with reference():
            module.check_passes(torch.device("cpu"))
            assert module.passes.packed
            out = module(tokens, mask)
        (out.logps * torch.linspace(-1, 1, tokens.numel()).view_as(tokens)).sum().backward()
        found.append([out.logps, *(p.grad for p in module.parameters() if p.grad is not None)])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max() + 1e-7


@pytest.mark.parametrize("attend", [packed_attention, by_flash, by_sdpa])
@pytest.mark.parametrize("layers", [2, 12])
def test_rounding_under_autocast_is_no_difference(attend: Attend, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hidden states are float32 there, with the errors of bfloat16."""
    module = Actor(random_model("qwen2", num_hidden_layers=layers, initializer_range=0.05))
    monkeypatch.setattr(attention, "packed_attention", attend)
    with reference(), torch.autocast("cpu", torch.bfloat16):
        module.check_passes(torch.device("cpu"))
    assert module.passes.packed


def test_a_kernel_with_another_order_of_keys_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose first query attends to the first key alone, and so not to the prompt."""

    def top_left(*args: Any, **options: Any) -> Tensor:
        query, key, value, query_starts, key_starts, *most = args
        spans = zip(query_starts[:-1].tolist(), query_starts.diff().tolist(), key_starts[:-1].tolist(), strict=True)
        kept = torch.cat([torch.arange(first, first + length) for _, length, first in spans])
        return attend_to_each(query, key[kept], value[kept], query_starts, query_starts, most[0], most[0], **options)

    module = Actor(random_model("qwen2"))
    monkeypatch.setattr(attention, "packed_attention", by_flash)
    monkeypatch.setattr(varlen, "varlen_attn", top_left)
    module.check_passes(torch.device("cpu"))
    assert not module.passes.packed
