"""Dividing rows into micro-batches, and groups among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget: int, groups: Sequence[int] | None = None) -> list[list[int]]:
    """Divide rows into micro-batches of at most `budget` tokens, padding included.

    Rows of similar length go together, longest first. A row that is longer than the budget, or a group that is larger,
    is a micro-batch of its own.

    Args:
        lengths: Tokens of each row.
        budget: Tokens of a micro-batch, as rows times its longest row.
        groups: The group of each row, whose rows stay together; None divides groups too.

    Returns:
        Lists of row indices; every row is in one of them.
    """
    together: dict[int, list[int]] = {}
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        together.setdefault(i if groups is None else groups[i], []).append(i)
    batches: list[list[int]] = []
    width = 0
    for rows in together.values():  # in the order of their longest rows
        if batches and (len(batches[-1]) + len(rows)) * width <= budget:
            batches[-1] += rows
        else:
            batches.append(rows)
            width = max(1, lengths[rows[0]])
    return batches


def group_micro_batches(
    groups: Sequence[int], prompts: Sequence[int], answers: Sequence[int], budget: int, *, divide: bool = True
) -> list[list[int]]:
    """Divide rows into micro-batches that compute the prompt of a group once.

    Groups stay together, unless one alone exceeds the budget; those with answers of similar length go together, the
    longest first.

    Args:
        groups: The group of each row, whose rows have one prompt.
        prompts: Tokens of its prompt.
        answers: Tokens after it.
        budget: Tokens of a micro-batch. One of a single row may have more.
        divide: Whether a group that alone exceeds the budget is divided.

    Returns:
        Lists of row indices; every row is in one of them.
    """
    members: dict[int, list[int]] = {}
    for i in sorted(range(len(groups)), key=lambda i: -answers[i]):
        members.setdefault(groups[i], []).append(i)
    batches: list[list[int]] = []
    used = 0
    for rows in members.values():  # in the order of their longest answers
        whole = prompts[rows[0]] + sum(answers[i] for i in rows)
        if batches and used + whole <= budget:
            batches[-1] += rows
            used += whole
            continue
        if not divide:
            batches.append(rows)
            used = whole
            continue
        for k, i in enumerate(rows):
            if k and used + answers[i] <= budget:
                batches[-1].append(i)
                used += answers[i]
            else:
                batches.append([i])
                used = prompts[i] + answers[i]
    return batches


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each group: the largest first, each to the rank with the least so far (Graham 1969)."""
    loads, chosen = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[chosen[i]] += sizes[i]
    return chosen
