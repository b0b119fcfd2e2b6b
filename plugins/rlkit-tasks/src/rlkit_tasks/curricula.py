"""Curricula: which training prompts come sooner, and which more often."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import NUMBER, Share
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.rows import field_of
from rlkit.interfaces.task import Curriculum
from rlkit.types import Prompt

__all__ = ["Difficulty", "SuccessRate"]


class Difficulty(Curriculum):
    """Each epoch goes from the easiest prompts to the hardest; prompts of one difficulty are in random order.

    Args:
        field: The field of the prompt's `meta` with a number, higher for harder; `a.b` is the field `b` inside `a`.
        hardest_first: Whether each epoch goes from the hardest to the easiest instead.
    """

    def __init__(self, field: str = "difficulty", hardest_first: bool = False) -> None:
        self.field = field
        self.hardest_first = hardest_first

    def difficulty(self, prompt: Prompt) -> float:
        value: object = None
        try:
            value = field_of(prompt.meta, self.field)
            number = as_number(float(value) if isinstance(value, str) else value)  # fields of CSV files are texts
        except Exception as error:
            raise RecipeError(
                f"curriculum Difficulty: prompt {prompt.id!r} has {self.field} {show(value)}, expected a finite number"
            ) from error
        return -number if self.hardest_first else number


class SuccessRate(Curriculum):
    """Prompts whose samples were all right or all wrong teach nothing, and come in every n-th epoch only.

    Each time that such a prompt comes, its new rate decides when it comes again: one that the policy forgets, or begins
    to solve, is in every epoch then. No prompt is ever left out for good.

    Args:
        every: How many epochs such a prompt waits.
        unsolved: The highest success rate that counts as never solved.
        solved: The lowest success rate that counts as always solved.
    """

    def __init__(
        self, every: Annotated[int, Ge(2), Le(1000), NUMBER] = 4, unsolved: Share = 0.0, solved: Share = 1.0
    ) -> None:
        if unsolved >= solved:
            raise RecipeError(f"SuccessRate has unsolved={unsolved} and solved={solved}, expected unsolved < solved")
        self.every = every
        self.unsolved = unsolved
        self.solved = solved

    def wait(self, rate: float) -> int:
        return 1 if self.unsolved < rate < self.solved else self.every
