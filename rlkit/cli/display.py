"""What a run shows: a progress bar on a terminal, lines elsewhere, and a table at the end."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("accuracy", "acc", ".2f"),
    ("policy/kl_ref", "kl", ".4f"),
    ("policy/kl_old", "kl", ".4f"),
    ("policy/entropy", "entropy", ".3f"),
    ("mismatch/max", "mismatch", ".0e"),
    ("time/tokens_per_second", "tok/s", ".0f"),
)


class Display:
    """A `Reporter` for people.

    Args:
        steps: How many there will be.
        quiet: Show nothing: on ranks other than 0.
    """

    def __init__(self, steps: int, quiet: bool = False) -> None:
        self.console = Console(quiet=quiet, highlight=False, soft_wrap=True)
        self.steps = steps
        self._start = time.monotonic()
        self._bar: Progress | None = None

    def note(self, text: str) -> None:
        self.console.print(text)

    def step(self, number: int, figures: dict[str, float]) -> None:
        shown = _summary(figures)
        if not self.console.is_terminal:
            left = (time.monotonic() - self._start) / number * (self.steps - number)
            self.console.print(f"step {number}/{self.steps}  {shown}  left {_clock(left)}")
            return
        if self._bar is None:
            columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"), TextColumn("left"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self._bar.add_task("steps", total=self.steps, shown=shown)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=number, shown=shown)

    def finish(self, result: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.stop()
        before, after = (result["validation"][when] or {} for when in ("before", "after"))
        if before:
            self.console.print(comparison(before, after))
        self.console.print(f"{result['status']}: {result['steps']} steps in {_clock(result['seconds'])}")


def comparison(before: dict[str, float], after: dict[str, float]) -> Table:
    """Make the table of validation figures before and after training."""
    table = Table("validation", "before", "after")
    for name, value in before.items():
        if not name.endswith(("failed", "unscored")) or value or after.get(name):
            table.add_row(name, f"{value:.3f}", f"{after[name]:.3f}" if name in after else "-")
    return table


def _summary(figures: dict[str, float]) -> str:
    shown: dict[str, str] = {}
    for name, label, form in SHOWN:
        if name in figures:
            shown.setdefault(label, f"{label} {figures[name]:{form}}")
    return "  ".join(shown.values())


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
