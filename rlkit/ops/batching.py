"""Dividing rows into micro-batches, and groups among ranks."""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Divide rows into micro-batches of at most `budget` tokens, padding included.

    Rows of similar length go together, longest first. A row that is longer than the budget is a micro-batch of its
    own.

    Args:
        lengths: Tokens of each row.
        budget: Tokens of a micro-batch, as rows times its longest row.

    Returns:
        Lists of row indices; every row is in one of them.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    batches: list[list[int]] = []
    width = 0
    for i in order:
        if batches and (len(batches[-1]) + 1) * width <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
            width = max(1, lengths[i])
    return batches


def assign(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return the rank of each group: the largest first, each to the rank with the least so far (Graham 1969)."""
    loads, chosen = [0] * ranks, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        chosen[i] = min(range(ranks), key=lambda rank: (loads[rank], rank))
        loads[chosen[i]] += sizes[i]
    return chosen
