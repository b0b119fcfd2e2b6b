"""The interface to what displays a run, the steps of a replay, and the outcome with its verdict."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Protocol

from rlkit.base.text import redact, source_of
from rlkit.records.rewards import RewardChange
from rlkit.records.verdict import Metrics, verdict_on
from rlkit.types import JsonObject, Trajectory

if TYPE_CHECKING:  # the terminal's words need no torch
    from rlkit.train.rollouts import Obtain


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

    def samples(self, number: int, trajectories: Sequence[Trajectory], count: int = 0) -> None:
        """Show so many completions of step `number`; for a count of 0 one, if it is due."""

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


MAX_WARNINGS = 100
"""Different warnings of a run that `result.json` keeps."""


@dataclass
class Outcome:
    """The outcome of a run: the content of `result.json`.

    `training_reward` holds the mean rewards of the first and the last steps, `diagnosis` why the run had nothing to
    learn from.
    """

    status: str = "failed"
    steps: int = 0
    validation: dict[str, Metrics | None] = field(default_factory=lambda: {"before": None, "after": None})
    seconds: float = 0.0
    error: dict[str, str] | None = None
    verdict: dict[str, object] | None = None
    training_reward: RewardChange | None = None
    diagnosis: str | None = None
    warnings: list[str] = field(default_factory=list)

    def set_verdict(self) -> None:
        """Set the verdict by the validations before and after."""
        verdict = verdict_on(self.validation["before"], self.validation["after"])
        self.verdict = None if verdict is None else asdict(verdict)


class WarningKeeper:
    """A `Reporter` that adds warnings to an outcome, each once, before it passes all on to another one."""

    def __init__(self, reporter: Reporter, outcome: Outcome) -> None:
        self._reporter = reporter
        self._warnings = outcome.warnings

    def __getattr__(self, name: str) -> object:
        return getattr(self._reporter, name)

    def note(self, text: str) -> None:
        """Keep the text if it is a new warning, and show it."""
        is_new = text.startswith("warning") and redact(text) not in self._warnings
        if is_new and len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(redact(text))
        self._reporter.note(text)


@contextmanager
def part_warnings_as(note: Callable[[str], None]) -> Iterator[None]:
    """Note what rlkit and plugins give to `warnings.warn` as warnings of the run; those of libraries stay."""
    show_before = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: object, **options: object) -> None:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") == "warnings":
            frame = frame.f_back
        source = source_of(str(frame.f_globals.get("__name__", "")))
        if category is UserWarning and (not source or source.startswith(" of plugin ")):
            note(f"warning: {message}")
        else:
            show_before(message, category, *place, **options)  # type: ignore[arg-type]

    with warnings.catch_warnings():  # so that each run shows what an earlier one has shown
        warnings.showwarning = show
        yield
