"""The interface of a task: where prompts come from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from rlkit.types import Prompt

Split = Literal["train", "validation"]


class Task(ABC):
    """Rows of data, and how a row becomes a prompt.

    The constructor stores its options and touches no file: data is read when `rows` is called.
    """

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        """Return the rows of a split, indexable in any order; may load lazily.

        Raises:
            RecipeError: The data is missing or not of the expected form.
        """

    @abstractmethod
    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        """Turn a row into the prompt that the policy sees, with the answer that the reward sees."""
