"""The interfaces of tasks, which provide prompts, and of curricula, which schedule them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

from rlkit.interfaces.rows import field_of  # noqa: F401 (plugins import it from here)
from rlkit.interfaces.runtime import RunPart
from rlkit.types import Prompt, Row

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

    @property
    def holds_out(self) -> bool:
        """Whether it has rows to validate on; a task that has to read them first says true."""
        return True


class RowReader(ABC):
    """Reads rows that no recipe names: those of a file that is to get a recipe, and those of a script."""

    @abstractmethod
    def rows_of(self, names: str, option: str) -> Sequence[Row]:
        """Return the rows of a file, or of all files that a pattern matches.

        Args:
            names: A path, a URL or a pattern.
            option: Where it is from, for messages.

        Raises:
            RecipeError: A file is missing, unreadable or of an unknown format.
        """

    @abstractmethod
    def task_of(self, rows: Sequence[Row]) -> Task:
        """Return a task that trains on rows in memory.

        Raises:
            RecipeError: They are no sequence of rows.
        """


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
