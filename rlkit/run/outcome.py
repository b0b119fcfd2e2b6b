"""The interface to what displays a run, the steps of a replay, and the outcome."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rlkit.train.rollouts import Obtain
from rlkit.types import JsonObject

Metrics = dict[str, float]


class Reporter(Protocol):
    """Displays a run."""

    def note(self, text: str) -> None:
        """Show a line of text."""

    def resumed(self, steps: Sequence[Metrics]) -> None:
        """Receive the metrics of the last steps before a resume."""

    def validated(self, number: int, metrics: Metrics) -> None:
        """Show the metrics of a validation after step `number`."""

    def step(self, number: int, metrics: Metrics) -> None:
        """Show a step's metrics."""

    def finish(self, result: JsonObject, advice: str) -> None:
        """Show the outcome, and what the user may do next."""


@dataclass(frozen=True)
class Replay:
    """Steps of an earlier run that are made again.

    Args:
        last: The last step, even if the recipe has more.
        obtain: Returns a step's rollouts; None to sample as the recipe does.
    """

    last: int
    obtain: Obtain | None = None


@dataclass
class Outcome:
    """The outcome of a run: the content of `result.json`."""

    status: str = "failed"
    steps: int = 0
    validation: dict[str, Metrics | None] = field(default_factory=lambda: {"before": None, "after": None})
    seconds: float = 0.0
    error: dict[str, str] | None = None
