"""Which training rows each step starts: by the seed alone, or by what happened to them before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor

from rlkit.interfaces import outputs
from rlkit.ops.random import permutation
from rlkit.recipe import Recipe
from rlkit.registry import calling, require

POSTPONED = -1
"""Instead of the epoch in which a row is due: it was drawn, but is still to be sampled."""


@lru_cache(maxsize=2)  # a step spans two epochs at most, unless the data are few
def permutation_of(seed: int | None, epoch: int, rows: int) -> Tensor:
    """Return the order of all rows in an epoch [rows] i64; that of the data set without a seed."""
    return torch.arange(rows) if seed is None else permutation(f"order/{seed}/{epoch}", rows)


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
        seed: Of the permutations; None for the data set's order.
        difficulty: [rows] f64: within an epoch rows come in this order, those of one difficulty at random; None for all
            at random.
    """

    def __init__(self, rows: int, seed: int | None, difficulty: Tensor | None = None) -> None:
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


@dataclass
class RowOrder:
    """The order of the training rows that a run uses.

    Args:
        recipe: Has the seed, the prompts of a step and the curriculum.
        rows: Indices of the training rows that are used, in the data set's order.
        by_outcome: Their order if it depends on the outcome of earlier steps; None if it follows from the seed alone.
    """

    recipe: Recipe
    rows: Sequence[int] = ()
    by_outcome: Order | None = None

    @property
    def count(self) -> int:
        """Number of prompts that a step starts; with `rollout.oversample`, more than it trains on."""
        return ceil(round(self.recipe.train.prompts_per_step * self.recipe.rollout.oversample, 6))

    def of_step(self, step: int) -> list[int]:
        """Return the rows of a step (the first is step 1).

        Each epoch is a permutation of all rows; a step may span two. With a curriculum or over-sampling, the rows are
        those of the next step, whatever its number.
        """
        if self.by_outcome is not None:
            return [self.rows[drawn.row] for drawn in self.drawn()]
        count = self.recipe.train.prompts_per_step
        return [self.at(position) for position in range((step - 1) * count, step * count)]

    def at(self, position: int) -> int:
        """Return the row at a position of the order that the seed determines, counted over all epochs."""
        count = len(self.rows)
        return self.rows[int(permutation_of(self.recipe.train.order_seed, position // count, count)[position % count])]

    def drawn(self) -> list[Drawn]:
        """Return the draws for the next step, in the order of its prompts; nothing if the seed decides alone."""
        return [] if self.by_outcome is None else self.by_outcome.draw(self.count)

    def record(self, drawn: Sequence[Drawn], rates: Mapping[int, float | None]) -> None:
        """Record the outcome of a step's prompts, alike on all ranks.

        Args:
            drawn: The step's, from `drawn`.
            rates: The success rate of each prompt by its index in the step, None if unknown. Prompts that are missing
                were stopped, and come first in the next step.

        Raises:
            PartError: The curriculum raised an error, or did not return a number of epochs.
        """
        if self.by_outcome is not None:
            waits = [self._wait(rates[slot]) if slot in rates else None for slot in range(len(drawn))]
            self.by_outcome.record(drawn, waits)

    def _wait(self, rate: float | None) -> int:
        curriculum = self.recipe.curriculum
        if curriculum is None or rate is None:
            return 1
        with calling(curriculum, "wait"):
            epochs = curriculum.wait(rate)
        require(curriculum, "wait", outputs.of_wait(epochs))
        return epochs
