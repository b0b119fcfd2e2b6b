"""Which training rows come when, where that depends on what happened to them before."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.ops.random import permutation

POSTPONED = -1
"""In location of the epoch in which a row is due: it was drawn, but is still to be sampled."""


@lru_cache(maxsize=2)  # a step spans two epochs at most, unless the data are few
def permutation_of(seed: int, epoch: int, rows: int) -> Tensor:
    """Return the order of all rows in an epoch [rows] i64."""
    return permutation(f"order/{seed}/{epoch}", rows)


class Drawn(NamedTuple):
    """A row that was drawn: its number, the epoch that it counts for, and whether it was postponed before."""

    row: int
    epoch: int
    postponed: bool


class Order:
    """Draws rows: an epoch is a permutation of the rows that are due in it.

    What is drawn depends on the seed and on `due` and `epoch` alone, which a checkpoint holds; drawing changes nothing
    until its outcome is recorded. Postponed rows come first. No row is lost: each is due again after finitely many
    epochs.

    Args:
        rows: How many there are, at least one.
        seed: Of the permutations.
        difficulty: [rows] f64: within an epoch rows come in this order, those of one difficulty at random; None for all
            at random.
    """

    def __init__(self, rows: int, seed: int, difficulty: Tensor | None = None) -> None:
        self.due = torch.zeros(rows, dtype=torch.int32)
        """[rows] i32: from which epoch on a row comes again."""
        self.epoch = torch.zeros(1, dtype=torch.int32)
        """[1] i32: the current one."""
        self._seed = seed
        self._difficulty = difficulty

    def tensors(self) -> dict[str, Tensor]:
        """Return the state for a checkpoint, by name."""
        return {"due": self.due, "epoch": self.epoch}

    def draw(self, count: int) -> list[Drawn]:
        """Return the next rows; if there are too few in an epoch, the next epoch begins."""
        due, epoch = self.due.clone(), int(self.epoch)
        first = (due == POSTPONED).nonzero().flatten()[:count]
        drawn = [Drawn(row, epoch, True) for row in first.tolist()]
        due[due == POSTPONED] = epoch + 1
        while True:
            permuted = self._permuted(epoch)
            rows = permuted[due[permuted] <= epoch][: count - len(drawn)]
            drawn += [Drawn(row, epoch, False) for row in rows.tolist()]
            due[rows] = epoch + 1
            if len(drawn) >= count:
                return drawn
            epoch = max(epoch + 1, int(due.min()))

    def record(self, drawn: Sequence[Drawn], waits: Sequence[int | None]) -> None:
        """Record the outcome of all that was drawn.

        Args:
            drawn: From `draw`.
            waits: For each, in how many epochs it is due again, 1 for the next; None where it is postponed.
        """
        for (row, epoch, _), wait in zip(drawn, waits, strict=True):
            self.due[row] = POSTPONED if wait is None else epoch + wait
        self.epoch[0] = max((epoch for _, epoch, _ in drawn), default=int(self.epoch))

    def waiting(self) -> float:
        """Return the share of rows that are due only after the next epoch."""
        return float((self.due > self.epoch + 1).float().mean())

    def _permuted(self, epoch: int) -> Tensor:
        permuted = permutation_of(self._seed, epoch, len(self.due))
        if self._difficulty is None:
            return permuted
        return permuted[torch.sort(self._difficulty[permuted], stable=True).indices]
