"""Dividing rows into micro-batches, and groups among ranks."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapreplace


def micro_batches(lengths: Sequence[int], budget: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Divide rows into micro-batches of at most `budget` tokens, padding included.

    Rows of similar length go together, longest first. A row or group that exceeds the budget is a micro-batch of its
    own.

    Args:
        lengths: Tokens of each row.
        budget: Maximum tokens of a micro-batch, counted as rows times its longest row.
        groups: The group of each row; rows of a group stay together. None divides groups too.

    Returns:
        Lists of row indices; every row is in exactly one of them.
    """
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        members.setdefault(i if groups is None else groups[i], []).append(i)
    batches: list[list[int]] = []
    width = 0
    for rows in members.values():  # in the order of their longest rows
        if batches and (len(batches[-1]) + len(rows)) * width <= budget:
            batches[-1] += rows
        else:
            batches.append(rows)
            width = max(1, lengths[rows[0]])
    return batches


def group_micro_batches(
    groups: Sequence[int], prompts: Sequence[int], completions: Sequence[int], budget: int, *, divide: bool = True
) -> list[list[int]]:
    """Divide rows into micro-batches that compute the prompt of a group once.

    Groups stay together unless a single group exceeds the budget; groups with completions of similar length go
    together, longest first.

    Args:
        groups: The group of each row; the rows of a group have the same prompt.
        prompts: Tokens of each row's prompt.
        completions: Tokens of each row after its prompt.
        budget: Maximum tokens of a micro-batch. A single row may exceed it.
        divide: Whether a group that exceeds the budget is divided.

    Returns:
        Lists of row indices; every row is in exactly one of them.
    """
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(groups)), key=lambda i: -completions[i]):
        members.setdefault(groups[i], []).append(i)
    batches: list[list[int]] = []
    used = 0
    for rows in members.values():  # in the order of their longest completions
        group_tokens = prompts[rows[0]] + sum(completions[i] for i in rows)
        if batches and used + group_tokens <= budget:
            batches[-1] += rows
            used += group_tokens
            continue
        if not divide:
            batches.append(rows)
            used = group_tokens
            continue
        for k, i in enumerate(rows):
            if k and used + completions[i] <= budget:
                batches[-1].append(i)
                used += completions[i]
            else:
                batches.append([i])
                used = prompts[i] + completions[i]
    return batches


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each group: largest groups first, each to the rank with the least load (Graham 1969)."""
    loads = [(0, rank) for rank in range(ranks)]  # a heap
    assigned = [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        load, rank = loads[0]
        assigned[i] = rank
        heapreplace(loads, (load + sizes[i], rank))
    return assigned
