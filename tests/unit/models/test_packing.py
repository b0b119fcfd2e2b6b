"""Prompts that rows share are computed once, with the same log-probs, values and gradients."""

from __future__ import annotations

import inspect
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlkit.distributed.fsdp2 import checkpoint_activations
from rlkit.models.actor import Actor, ScoreModel, ValueModel
from rlkit.models.packing import PackedPasses, Packing
from rlkit.ops.attention import WASTE, divide_by_length, packed_attention
from rlkit.ops.batching import group_micro_batches
from rlkit.testing import random_model
from rlkit.types import Media, MediaSegment

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {}, "llama": {}, "mistral": {"sliding_window": 6}, "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "qwen3": {"head_dim": 8, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
}  # fmt: skip


@cache
def actor(kind: str) -> Actor:
    return Actor(random_model(kind, **ARCHITECTURES[kind]))


def rows_of(prompts: list[int], answers: list[list[int]], seed: int) -> tuple[Tensor, Tensor]:
    """Return tokens and mask: a group for each prompt's length, a row for each answer's; some tokens are a tool's."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        found: list[int] = torch.randint(3, 250, (count,), generator=generator).tolist()
        return found

    tokens, mask = [], []
    for length, group in zip(prompts, answers, strict=True):
        prompt = draw(length)
        for count in group:
            tokens.append(prompt + draw(count))
            mask.append([False] * length + [i % 5 != 3 for i in range(count)])
    width = max(map(len, tokens)) + 2
    return (
        torch.tensor([row + [0] * (width - len(row)) for row in tokens]),
        torch.tensor([row + [False] * (width - len(row)) for row in mask]),
    )


@pytest.mark.parametrize("kind", ARCHITECTURES)
@settings(deadline=None, max_examples=5)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 12), min_size=1, max_size=4)), min_size=1, max_size=3
    ),
    st.integers(0, 99),
)
def test_packing_changes_neither_log_probs_nor_gradients(
    kind: str, groups: list[tuple[int, list[int]]], seed: int
) -> None:
    module = actor(kind)
    assert module.passes.packed
    tokens, mask = rows_of([n for n, _ in groups], [counts for _, counts in groups], seed)
    found = []
    for shared in (True, False):
        module.passes.packed = shared
        module.zero_grad()
        out = module(tokens, mask)
        ((out.logps + 0.1 * out.entropy) * torch.linspace(-1, 1, tokens.numel()).view_as(tokens)).sum().backward()
        gradients = [p.grad for p in module.parameters() if p.grad is not None]
        found.append((out.logps, out.entropy, *gradients) if mask.any() else (out.logps, out.entropy))
    module.passes.packed = True
    for one, other in zip(*found, strict=True):
        assert (one - other).abs().max() <= 1e-4 * other.abs().max() + 1e-6  # sums of up to 100 terms in float32


def test_values_are_the_same_too() -> None:
    torch.manual_seed(0)
    critic = ValueModel(random_model("llama").get_decoder())
    torch.nn.init.normal_(critic.head.weight)
    tokens, mask = rows_of([7, 4], [[3, 9, 1], [2, 2]], 0)
    assert critic.passes.packed
    shared = critic(tokens, mask)
    critic.passes.packed = False
    torch.testing.assert_close(shared, critic(tokens, mask), rtol=1e-4, atol=1e-5)
    assert shared[mask].abs().min() > 0
    assert not shared[~mask].any()


def test_a_prompt_is_computed_once_and_nothing_is_padded() -> None:
    """Prompts of 7 and 4 tokens, and answers of 10, 3, 2, 2 and 1, each from the last token of its prompt on."""
    module, shapes = actor("qwen2"), []
    layer = module.policy.model.layers[0]  # type: ignore[operator, union-attr]
    hook = layer.register_forward_pre_hook(lambda _, inputs: shapes.append(tuple(inputs[0].shape[:2])))  # type: ignore[union-attr]
    tokens, mask = rows_of([7, 4], [[3, 10, 1], [2, 2]], 0)
    with torch.no_grad():
        module(tokens, mask)
    hook.remove()  # type: ignore[union-attr]
    assert shapes == [(1, 6 + 3 + 10 + 1 + 3 + 2 + 2)]


@pytest.mark.parametrize("recomputed", [False, True])
def test_the_last_mlp_computes_only_tokens_with_a_loss(recomputed: bool) -> None:
    """Prompts of 7 and 4 tokens: each layer before has all 26 tokens, the last one those that predict an answer's."""
    module, rows = Actor(random_model("qwen2")), []
    if recomputed:
        checkpoint_activations(module)
    first, last = module.policy.get_decoder().layers
    for layer in (first, last):
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, inputs: rows.append(inputs[0].shape[-2]))
    tokens, mask = rows_of([7, 4], [[3, 10, 1], [2, 2]], 0)
    module(tokens, mask).logps.sum().backward()
    forward = [6 + 3 + 10 + 1 + 3 + 2 + 2, int(mask.sum())]
    assert mask.sum() < 18
    assert rows == forward + forward[::-1] * recomputed
    gradients = [weight.grad.clone() for weight in module.parameters()]
    module.zero_grad()
    module.passes.packed = False
    module(tokens, mask).logps.sum().backward()
    for weight, gradient in zip(module.parameters(), gradients, strict=True):
        assert (gradient - weight.grad).norm() <= 1e-5 * weight.grad.norm()


def test_long_sequences_are_padded_to_few_lengths() -> None:
    module, shapes = actor("qwen2"), []
    hook = module.policy.model.layers[0].register_forward_pre_hook(lambda _, x: shapes.append(x[0].shape[1]))  # type: ignore[operator, union-attr]
    tokens, mask = rows_of([50, 30], [[40, 30], [20, 20]], 0)
    out = module(tokens, mask)
    hook.remove()  # type: ignore[union-attr]
    assert shapes == [256]  # of 49 + 40 + 30 + 29 + 20 + 20 = 188
    module.passes.packed = False
    torch.testing.assert_close(out.logps, module(tokens, mask).logps, rtol=1e-4, atol=1e-5)
    module.passes.packed = True


def test_the_last_mlp_of_long_sequences_has_few_numbers_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 tokens 88 to 95 predict: 128 are computed, with the gradients of 88 to 95."""
    module, rows = Actor(random_model("qwen2")), []
    module.policy.get_decoder().layers[-1].mlp.down_proj.register_forward_pre_hook(
        lambda _, inputs: rows.append(inputs[0].shape[-2])
    )

    def passes() -> list[Tensor]:
        results = []
        for count in range(20, 29):
            module.zero_grad()
            tokens, mask = rows_of([50, 30], [[40, 30], [20, count]], count)
            module(tokens, mask).logps.sum().backward()
            results += [weight.grad.clone() for weight in module.parameters()]
        return results

    rounded = passes()
    assert set(rows) == {128}
    rows.clear()
    monkeypatch.setattr("rlkit.models.packing.rounded_up", lambda read, _: read)
    exact = passes()
    assert len(set(rows)) > 5
    for found, expected in zip(rounded, exact, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_models_whose_passes_cannot_be_packed_take_plain_ones() -> None:
    assert not PackedPasses(random_model("mamba", state_size=4, num_heads=4).get_decoder()).packed
    assert not PackedPasses(None).packed


def attends_wrongly(query: Tensor, *_: object, **__: object) -> Tensor:
    return query * 2


def raises(*_: object, **__: object) -> Tensor:
    raise TypeError("unexpected keyword argument 'enable_gqa'")


@pytest.mark.parametrize(
    ("attend", "changes", "reason"),
    [
        (attends_wrongly, {}, "packed passes differ by .* expected at most 0.001"),
        (raises, {}, "a packed pass failed with TypeError: .* 'enable_gqa'"),
        (packed_attention, {"attention_dropout": 0.1}, "attention_dropout is 0.1, expected 0"),
        (packed_attention, {"attn_implementation": "eager"}, "attention is eager, and only sdpa can be packed"),
    ],
)
def test_why_passes_are_not_packed(
    attend: Any, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlkit.models.attention.packed_attention", attend)
    passes = Actor(random_model("qwen2", **changes)).passes
    assert not passes.packed
    assert re.search(reason, passes.reason or "")


def test_methods_that_fsdp_wraps_take_an_argument() -> None:
    """On a GPU, FSDP of torch 2.11 reads the first of none."""
    for module in (Actor, ScoreModel, ValueModel):
        for name in module.forward_methods:
            _, first, *_ = inspect.signature(getattr(module, name)).parameters.values()
            assert first.default is inspect.Parameter.empty, (module, name)


def test_passes_are_counted_by_whether_they_are_packed() -> None:
    """A dummy row of other ranks does not count."""
    tokens, mask = rows_of([7], [[3, 1]], 0)
    passes, backbone = actor("mistral").passes, actor("mistral").policy.get_decoder()
    passes.take_counts()
    with torch.no_grad():
        for packed, of in ((False, mask), (True, mask), (True, mask), (True, mask & False)):
            passes.packed = packed
            passes(backbone, tokens, of)
    assert passes.take_counts() == (2, 3)
    assert passes.take_counts() == (0, 0)


def test_prompts_end_before_the_first_token_of_the_policy() -> None:
    """Rows 0 and 1 share a prompt; nothing precedes row 2, and row 4 has nothing to predict."""
    tokens = torch.tensor([[5, 6, 7, 8, 0], [5, 6, 7, 9, 4], [5, 3, 7, 8, 0], [1, 2, 3, 4, 5]])
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 1], [0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]).bool()
    packing = Packing(tokens, mask)
    assert packing.ids == [5, 6, 7, 6, 7, 9, 5, 3, 7]
    assert packing.positions == [0, 1, 2, 1, 2, 3, 0, 1, 2]
    assert packing.segments == [(0, 1), (1, 3), (3, 6), (6, 9)]
    assert packing.shared == [(0, 1, 6)]
    assert packing.indices.tolist() == [2, 3, 5 + 2, 5 + 4, 10 + 3]
    assert packing.predicts.nonzero().flatten().tolist() == [1, 2, 3, 5, 8]
    assert packing.longest == 4


def beginning_alike(prompts: list[int], answers: list[list[int]], common: int) -> tuple[Tensor, Tensor]:
    """Return `rows_of` these lengths after tokens that all rows have in common."""
    tokens, mask = rows_of(prompts, answers, 0)
    beginning = torch.arange(3, 3 + common).expand(len(tokens), -1)
    return torch.cat((beginning, tokens), 1), torch.cat((torch.zeros_like(beginning, dtype=torch.bool), mask), 1)


@pytest.mark.parametrize("kind", ["qwen2", "llama", "qwen3"])
def test_a_common_beginning_is_computed_once(kind: str) -> None:
    """A beginning of 20 tokens, then 2 + 3, 3 + 2 and 4 + 1 of prompts and answers, whose last predict nothing."""
    tokens, mask = beginning_alike([2, 3, 4], [[3], [2], [1]], 20)
    packing = Packing(tokens, mask)
    assert packing.segments == [(0, 20), (20, 24), (24, 28), (28, 32)]
    assert packing.positions[20:24] == [20, 21, 22, 23]
    assert packing.shared == [(0, 20, 32)]
    module, results = Actor(random_model(kind)), []
    for packed in (True, False):
        module.passes.packed = packed
        out = module(tokens, mask)
        out.logps.sum().backward()
        results.append([out.logps.detach(), *(weight.grad.clone() for weight in module.parameters())])
        module.zero_grad()
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=5e-5)


@pytest.mark.parametrize(
    ("prompts", "answers", "common", "shared"),
    [
        ([2, 3], [[3], [2]], 15, []),
        ([190, 190], [[3], [2]], 18, []),
        ([20, 25], [[3, 2], [1, 2]], 20, [(0, 39, 44), (44, 88, 91)]),
    ],
    ids=["short", "less than a twentieth", "prompts that save more"],
)
def test_beginnings_that_save_little_are_not_shared(
    prompts: list[int], answers: list[list[int]], common: int, shared: list[tuple[int, int, int]]
) -> None:
    assert Packing(*beginning_alike(prompts, answers, common)).shared == shared


def test_beginnings_with_other_pictures_are_not_shared() -> None:
    """Their tokens are alike, but a picture stands in the first ten of each row."""
    tokens, mask = beginning_alike([2, 3], [[3], [2]], 20)
    pictures: list[Any] = [SimpleNamespace(digest=digest) for digest in "ab"]
    packing = Packing(tokens, mask, [Media([MediaSegment({}, (picture,), 10)]) for picture in pictures])
    assert packing.shared == []
    assert [segment.pictures for segment in packing.media] == [(picture,) for picture in pictures]


@given(st.lists(st.integers(0, 50), max_size=30))
def test_passes_hold_every_row_with_little_padding(lengths: list[int]) -> None:
    buckets = divide_by_length(lengths)
    assert sorted(i for rows in buckets for i in rows) == [i for i, n in enumerate(lengths) if n]
    for rows in buckets:
        used = [lengths[i] for i in rows]
        assert used == sorted(used, reverse=True)
        assert sum(used) >= (1 - WASTE) * used[0] * len(rows) - 1e-9


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 30)), max_size=20),
    st.lists(st.integers(0, 40), min_size=5, max_size=5),
    st.integers(1, 120),
)
def test_micro_batches_of_groups_stay_within_the_budget(
    rows: list[tuple[int, int]], prompts: list[int], budget: int
) -> None:
    groups, answers = [g for g, _ in rows], [n for _, n in rows]
    found = group_micro_batches(groups, [prompts[g] for g in groups], answers, budget)
    assert sorted(i for part in found for i in part) == list(range(len(rows)))
    for part in found:
        cost = sum(prompts[g] for g in {groups[i] for i in part}) + sum(answers[i] for i in part)
        assert cost <= budget or len(part) == 1
    for group in set(groups):  # whole, if it fits
        if prompts[group] + sum(n for g, n in rows if g == group) <= budget:
            assert sum(any(groups[i] == group for i in part) for part in found) == 1
    undivided = group_micro_batches(groups, [prompts[g] for g in groups], answers, budget, divide=False)
    assert sorted(i for part in undivided for i in part) == list(range(len(rows)))
    for part in undivided:
        mine = {groups[i] for i in part}
        assert sorted(part) == [i for i, g in enumerate(groups) if g in mine]
        assert len(mine) == 1 or sum(prompts[g] for g in mine) + sum(answers[i] for i in part) <= budget
