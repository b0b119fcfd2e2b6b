"""By each prompt's recent success rate."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge, Le

from rlkit.errors import RecipeError
from rlkit.interfaces.task import Curriculum
from rlkit.ranges import NUMBER, Share


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
