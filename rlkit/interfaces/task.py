"""The interfaces of tasks, which provide prompts, and of curricula, which schedule them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Literal

from rlkit.interfaces.runtime import RunPart
from rlkit.types import Prompt, Row


def field_of(row: Row, name: str) -> object:
    """Return the value of a column; `a.b` is the field `b` of the column `a`, unless a column has this name.

    Raises:
        KeyError: There is none.
    """
    if name in row:
        return row[name]
    value: object = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(name)
        value = value[key]
    return value


Split = Literal["train", "validation"]


class Task(RunPart):
    """Provides rows of data, and builds prompts from rows.

    The constructor stores options and reads no file: data is read when `rows` is called.
    """

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Row]:
        """Return the rows of a split, indexable in any order; may be loaded lazily.

        Raises:
            RecipeError: The data is missing or not of the expected form.
        """

    @abstractmethod
    def prompt(self, row: Row, index: int) -> Prompt:
        """Build a prompt from a row: messages for the policy, and the answer for the reward."""


class Curriculum(RunPart):
    """Schedules training prompts: which come sooner, and which more often; see `rlkit.data.order.Order`.

    It has no state: a checkpoint holds when each row is due.
    """

    def difficulty(self, prompt: Prompt) -> float:
        """Return a finite number. An epoch goes from the lowest to the highest, with equal ones in random order."""
        return 0.0

    def wait(self, rate: float) -> int:
        """Return the number of epochs until a prompt is due again, from 1, the next one, to 1,000.

        Args:
            rate: Mean accuracy of the prompt's samples in this step, or mean reward if there is no accuracy.
        """
        return 1
