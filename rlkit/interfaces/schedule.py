"""The interface of a learning-rate schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar


class Schedule(ABC):
    """Says how the learning rate goes on after the warm-up.

    It has no state: a resumed run takes the rate from the number of the step.
    """

    formula: ClassVar[str] = ""
    """What `explain` prints after the class's name, with the constructor's options by name."""

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Return the share of `lr` for a step, finite and not negative.

        `progress` is the share of the steps after the warm-up that are done: 0 at the first of them, below 1 at the
        last.
        """

    def explain(self) -> str:
        """Return the class's name and its options in force."""
        return f"{type(self).__name__} {self.formula.format(**vars(self))}".rstrip()
