"""The interface of tasks: the source of prompts."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Literal

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
