"""Which training rows each step starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from rlkit.interfaces import outputs
from rlkit.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.tasks.order import Drawn, Order, permutation_of


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
        return self.rows[int(permutation_of(self.recipe.train.seed, position // count, count)[position % count])]

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
