"""What rlkit shows: texts made safe for a terminal; of a run, a progress bar or lines, and a table at the end."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from rich.text import Text

from rlkit.errors import shorten
from rlkit.text import safe

SHOWN = (
    ("reward/mean", "reward", ".3f"),
    ("accuracy", "acc", ".2f"),
    ("policy/kl_ref", "kl", ".4f"),
    ("policy/kl_old", "kl", ".4f"),
    ("policy/entropy", "entropy", ".3f"),
    ("mismatch/max", "mismatch", ".0e"),
    ("time/tokens_per_second", "tok/s", ".0f"),
)


LONGEST = 20_000
"""Characters of a text that are shown."""


def echo(text: str, *, error: bool = False) -> None:
    """Print a text as it is, whoever wrote it: no markup, no control codes, no credentials."""
    print(shown(text), file=sys.stderr if error else sys.stdout)


def shown(text: str) -> str:
    """Return what a terminal may be given of a text."""
    return safe(shorten(text, LONGEST))


def cell(text: str) -> Text:
    """Return a text as a table's cell: no markup, no control codes, no credentials."""
    return Text(shown(text))


def show(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    Console().print(make_table(header, rows))


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose texts are shown literally and whole: a word that is wider than its column is folded."""
    table = Table(*(Column(name, overflow="fold") for name in header), show_edge=False)
    for row in rows:
        table.add_row(*map(cell, row))
    return table


class Display:
    """A `Reporter` for people.

    Args:
        steps: How many there will be.
        quiet: Show nothing: on ranks other than 0.
    """

    def __init__(self, steps: int, quiet: bool = False) -> None:
        # a notebook is none, whatever its environment says of colours: it gets lines
        self.console = Console(
            quiet=quiet, highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=_on_terminal()
        )
        self.steps = steps
        self._clock: tuple[int, float] | None = None
        self._bar: Progress | None = None

    def note(self, text: str) -> None:
        self.console.print(cell(text))

    def step(self, number: int, figures: dict[str, float]) -> None:
        summary = _summary(figures)
        if not self.console.is_terminal:
            self.console.print(f"step {number}/{self.steps}  {summary}{self._left(number)}")
            return
        if self._bar is None:
            columns = (BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[shown]}"), TextColumn("left"))
            self._bar = Progress(*columns, TimeRemainingColumn(), console=self.console)
            self._bar.add_task("steps", total=self.steps, completed=number - 1, shown=summary)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], completed=number, shown=summary)

    def finish(self, result: dict[str, Any], advice: str) -> None:
        if self._bar is not None:
            self._bar.stop()
        before, after = (result["validation"][when] or {} for when in ("before", "after"))
        if before:
            self.console.print(comparison(before, after))
        steps = f"{result['steps']} step{'s' * (result['steps'] != 1)}"
        self.note(f"{result['status']}: {steps} in {_clock(result['seconds'])}; {advice}")

    def _left(self, number: int) -> str:
        """Return the estimated remaining time, from the pace of this process's steps after its first."""
        now = time.monotonic()
        if self._clock is None:
            self._clock = (number, now)
            return ""
        first, since = self._clock
        return f"  left {_clock((now - since) / (number - first) * (self.steps - number))}"


def _on_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except ValueError:  # it is closed
        return False


def comparison(before: dict[str, float], after: dict[str, float]) -> Table:
    """Return the table of validation metrics before and after training."""
    first, last = dict(figure_rows(before)), dict(figure_rows(after))
    rows = []
    for name, value in first.items():
        p_value = after.get(f"{name}_p_start")
        if not name.endswith(("failed", "unscored")) or before[name] or after.get(name):
            rows.append((name, value, last.get(name, "-"), "" if p_value is None else f"{p_value:.2g}"))
    return make_table(("validation", "before", "after", "p if equal"), rows)


def by_checkpoint(figures: Mapping[str, Mapping[str, float]]) -> Table:
    """Return the table of several checkpoints' validation figures, with p-values of comparisons with the first."""
    texts = {checkpoint: dict(figure_rows(one)) for checkpoint, one in figures.items()}
    rows = []
    for name in dict.fromkeys(name for one in texts.values() for name in one):
        if name.endswith(("failed", "unscored")) and not any(one.get(name) for one in figures.values()):
            continue
        for number, (checkpoint, one) in enumerate(figures.items()):
            p_value = one.get(f"{name}_p_first")
            shown = "" if p_value is None else f"{p_value:.2g}"
            rows.append(("" if number else name, checkpoint, texts[checkpoint].get(name, "-"), shown))
    return make_table(("validation", "checkpoint", "", "p if equal"), rows)


def figure_rows(figures: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the names and texts of validation's figures, with intervals or standard errors, and without p-values."""
    rows = []
    for name, value in figures.items():
        if not re.fullmatch(r"(sampled_)?accuracy_(low|high|p_\w+)", name) and not name.endswith("_stderr"):
            low, high, error = (figures.get(f"{name}_{end}") for end in ("low", "high", "stderr"))
            bounds = "" if low is None else f" ({low:.2f}-{high:.2f})"
            rows.append((name, f"{value:.3f}{bounds}" if error is None else f"{value:.3f} ± {error:.3f}"))
    return rows


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
