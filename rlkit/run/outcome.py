"""The interface to what displays a run, the steps of a replay, and the outcome with its verdict."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from rlkit.base.text import redact
from rlkit.recipe.trust import risk
from rlkit.run.alarms import RewardChange
from rlkit.types import JsonObject, Trajectory

if TYPE_CHECKING:  # the terminal's words need no torch
    from rlkit.train.rollouts import Obtain

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


SMALLEST_P = 1 / 4001
"""The least p-value of a resampling test, with 4,000 resamples: the true one may be smaller."""
SIGNIFICANT = 0.05
"""The largest p-value of a change that is no chance."""
MAX_WARNINGS = 100
"""Different warnings of a run that `result.json` keeps."""

VERDICT_METRICS = ("accuracy", "sampled_accuracy", "reward", "sampled_reward")
"""Metrics that a verdict may be on; it is on the first that both validations have."""


@dataclass(frozen=True)
class Verdict:
    """How validation accuracy has changed in a run, or the reward of validation if it gives no accuracy.

    Args:
        metric: `accuracy` or `reward` of greedy completions; `sampled_accuracy` or `sampled_reward` without these.
        before: Its value before training.
        after: Its value after training.
        p_value: Of the paired comparison of the two.
        change: `unchanged` if the p-value exceeds 0.05.
    """

    metric: str
    before: float
    after: float
    p_value: float
    change: Literal["improved", "unchanged", "worse"]

    def __str__(self) -> str:
        kind, _, metric = self.metric.rpartition("_")
        values = f"{self.before:.3f} -> {self.after:.3f} (p-value {p_text(self.p_value)})"
        return f"{self.change}: {kind or 'greedy'} {metric} {values}"


def p_text(p_value: float) -> str:
    """Return a p-value as text: an upper bound if a resampling test cannot give a smaller one."""
    return "< 0.0003" if p_value == SMALLEST_P else f"{p_value:.2g}"


def verdict_on(before: Metrics | None, after: Metrics | None) -> Verdict | None:
    """Return the change of accuracy or reward between two validations; None if they cannot be compared."""
    for metric in VERDICT_METRICS:
        if before is None or after is None or not {metric, f"{metric}_p_start"} <= after.keys() or metric not in before:
            continue
        p_value = after[f"{metric}_p_start"]
        is_significant = p_value <= SIGNIFICANT and after[metric] != before[metric]
        change: Literal["improved", "worse"] = "improved" if after[metric] > before[metric] else "worse"
        return Verdict(metric, before[metric], after[metric], p_value, change if is_significant else "unchanged")
    return None


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

    def note(self, text: str) -> None:
        """Keep the text if it is a new warning, and show it."""
        is_new = text.startswith("warning") and redact(text) not in self._warnings
        if is_new and len(self._warnings) < MAX_WARNINGS:
            self._warnings.append(redact(text))
        self._reporter.note(text)

    def resumed(self, steps: Sequence[Metrics]) -> None:
        """Pass on the metrics of the last steps before a resume."""
        self._reporter.resumed(steps)

    def validated(self, number: int, metrics: Metrics) -> None:
        """Show the metrics of a validation."""
        self._reporter.validated(number, metrics)

    def step(self, number: int, metrics: Metrics) -> None:
        """Show a step's metrics."""
        self._reporter.step(number, metrics)

    def samples(self, number: int, trajectories: Sequence[Trajectory], count: int = 0) -> None:
        """Show completions."""
        self._reporter.samples(number, trajectories, count)

    def finish(self, result: JsonObject, advice: str) -> None:
        """Show the outcome."""
        self._reporter.finish(result, advice)


def next_command(run: Path, is_complete: bool, save_folder: str | None, recipe: JsonObject) -> str:
    """Return the command that exports the model of a complete run, or continues another one.

    Args:
        run: The run folder.
        is_complete: Whether the run has made all its steps.
        save_folder: The folder of its checkpoints; None if they are in the run folder.
        recipe: The run's recipe as data.
    """
    path = shlex.quote(str(run))
    if is_complete:
        return f"rlkit export --checkpoint {path} --out MODEL"
    if save_folder is None:
        return f"rlkit fit --resume {path}{' --allow-code' * (risk(recipe) is not None)}"
    options = f"--out {path} --resume auto --save.folder {shlex.quote(save_folder)}"
    return f"rlkit fit --recipe {path}/recipe.yaml {options}"
