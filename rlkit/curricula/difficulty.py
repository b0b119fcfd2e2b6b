"""From easy to hard, by a column of the data."""

from __future__ import annotations

from rlkit.errors import RecipeError, show
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.task import Curriculum, field_of
from rlkit.types import Prompt


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
