"""Micro-batches: which rows go together, as many passes on every rank, and that no split changes what is computed."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlkit.ops.batching import assign
from rlkit.train.microbatch import aligned_micro_batches, forward_in_micro_batches, select_rows
from rlkit.types import RolloutBatch
from tests.unit.phases import LENGTHS, scored


def alone(value: float) -> float:
    return value


def test_rows_of_similar_length_go_together_within_the_limit() -> None:
    """Lengths 3, 2, 4, 3: the longest alone in 6 tokens, two of 3 fill it, the one of 2 is left."""
    assert aligned_micro_batches(scored(), range(4), 6, alone) == [[2], [0, 3], [1]]
    assert aligned_micro_batches(scored(), [3, 1], 6, alone) == [[3, 1]]
    assert aligned_micro_batches(scored(), [1, 2], 1, alone) == [[2], [1]]


def test_every_rank_makes_as_many_passes() -> None:
    """Another rank has four micro-batches: two more without rows follow here."""
    asked: list[float] = []

    def agree(value: float) -> float:
        asked.append(value)
        return 4.0

    assert aligned_micro_batches(scored(), [0, 1], 3, agree) == [[0], [1], [], []]
    assert aligned_micro_batches(scored(), [], 3, agree) == [[], [], [], []]
    assert asked == [2, 0]


def test_what_is_computed_lies_where_its_tokens_do() -> None:
    passes: list[tuple[int, ...]] = []

    def fn(tokens: Tensor, mask: Tensor, media: object) -> tuple[Tensor, Tensor]:
        assert not torch.is_grad_enabled()
        passes.append(tuple(tokens.shape))
        return 10.0 * tokens, mask.float()

    batch = scored()
    tens, masks = forward_in_micro_batches(fn, batch, 6, lambda _: 4)
    assert tens.tolist() == [[10, 20, 30, 0], [10, 40, 0, 0], [10, 50, 10, 20], [10, 30, 20, 0]]
    assert torch.equal(masks, batch.mask.float())
    assert passes == [(1, 4), (2, 3), (1, 2), (1, 2)]  # the last is a dummy row


def test_a_function_returns_equally_many_tensors_each_time() -> None:
    left = [2, 2, 1]

    def fn(tokens: Tensor, mask: Tensor, media: object) -> list[Tensor]:
        return [mask.float()] * left.pop(0)

    with pytest.raises(ValueError, match="shorter"):
        forward_in_micro_batches(fn, scored(), 6, alone)


def test_no_rows_are_a_dummy_row_without_chosen_tokens() -> None:
    part, tokens, mask = select_rows(scored(), [])
    assert (len(part), tokens.tolist(), mask.tolist()) == (0, [[0, 0]], [[False, False]])
    part, tokens, mask = select_rows(scored(), [1, 0])
    assert part.group.tolist() == [0, 0]
    assert tokens.tolist() == [[1, 4, 0], [1, 2, 3]]
    assert mask.tolist() == [[False, True, False], [False, True, True]]


@given(limit=st.integers(1, 40), more=st.integers(0, 3))
def test_no_limit_changes_what_is_computed(limit: int, more: int) -> None:
    batch = scored()
    [found] = forward_in_micro_batches(
        lambda tokens, mask, media: ((tokens * mask).float(),), batch, limit, lambda n: n + more
    )
    assert torch.equal(found, (batch.tokens * batch.mask).float())
    micros = aligned_micro_batches(batch, range(4), limit, alone)
    assert sorted(row for micro in micros for row in micro) == [0, 1, 2, 3]
    assert all(len(m) * max(LENGTHS[r] for r in m) <= limit for m in micros if len(m) > 1)


@given(limit=st.integers(1, 40), order=st.permutations(range(4)), packed=st.booleans())
def test_whole_groups_are_in_one_micro_batch_at_any_limit(limit: int, order: list[int], packed: bool) -> None:
    """Rows of 3, 2 and 4, 3 tokens: the second group first, with the first one where both fit."""
    micros = aligned_micro_batches(scored(), order, limit, alone, packed, whole_groups=True)
    both = 12 if packed else 4 * 4
    assert [sorted(micro) for micro in micros] == ([[0, 1, 2, 3]] if limit >= both else [[2, 3], [0, 1]])


@pytest.mark.parametrize(
    ("limit", "whole", "expected"),
    [
        (17, False, [[0, 1, 2, 3]]),
        (16, False, [[0, 1], [2, 3]]),
        (8, False, [[0], [1], [2, 3]]),
        (8, True, [[0, 1], [2, 3]]),
        (1, True, [[0, 1], [2, 3]]),
    ],
)
def test_packed_passes_compute_the_prompt_of_a_group_once(limit: int, whole: bool, expected: list[list[int]]) -> None:
    """Prompts of 3 tokens, whose last one is a row's own: groups of 2 + (4 + 3) and of 2 + (4 + 2) tokens."""
    columns, tokens = torch.arange(6), torch.ones(4, 6, dtype=torch.long)
    attention = columns < torch.tensor([6, 5, 6, 4])[:, None]
    mask, zeros = attention & (columns > 2), torch.zeros(4, 6)
    batch = RolloutBatch(
        tokens=tokens, attention=attention, mask=mask, rollout_logps=zeros, group=scored().group, versions=tokens
    )
    assert aligned_micro_batches(batch, range(4), limit, alone, True, whole_groups=whole) == expected


def test_groups_are_divided_among_ranks_by_their_size() -> None:
    """The largest first, each to the rank with the least: 9 | 7, then 5 | 9 + 0, 4 to 7 + 5 > 9, and so on."""
    assert assign([4, 9, 5, 7], 2) == [0, 0, 1, 1]  # 9 + 4 and 7 + 5
    assert assign([3, 3, 3], 2) == [0, 1, 0]
    assert assign([], 3) == []
    assert assign([1, 2], 3) == [1, 0]
