"""What is shown of a run: a progress bar or lines, and a table at the end."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from rich.console import Console, ConsoleOptions
from rich.live import Live
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from rlkit.base.terminal import cell, make_table, printable
from rlkit.base.text import counted
from rlkit.cli.samples import differing_prompts, sample_text
from rlkit.records.rewards import RewardChange, mean_text, repeats
from rlkit.records.validation_metrics import metric_rows
from rlkit.records.verdict import Verdict, p_text
from rlkit.types import JsonObject, Trajectory

SHOWN = (
    ("policy/loss", "loss", ".4f"),
    ("reward/mean", "reward", ".3f"),
    ("accuracy", "acc", ".2f"),
    ("policy/preference_accuracy", "preferred", ".2f"),
    ("policy/margin", "margin", ".2f"),
    ("policy/kl_ref", "kl", ".4f"),
    ("policy/kl_old", "kl", ".4f"),
    ("policy/entropy", "entropy", ".3f"),
    ("mismatch/max", "mismatch", ".0e"),
    ("time/tokens_per_second", "tok/s", ".0f"),
    ("time/tokens_per_second_per_device", "tok/s", ".0f"),
)


PHASES = ("sample", "logps", "score", "update", "sync")
"""Of a step, whose times are among its metrics."""

RECENT = 20
"""So many of the last steps are averaged."""

BAR = 24
"""Cells of the bar of steps."""

SAMPLE_STEPS = 10
"""Steps between completions that are shown on a terminal, if the recipe does not say."""

SHOWN_WARNINGS = 10
"""Warnings that are shown again at the end of a run; `result.json` has all."""
STYLES = {"improved": "green", "unchanged": "yellow", "worse": "bold red"}
"""The colours of verdicts."""
REMEDIES = {
    "improved": "",
    "unchanged": "; see `rlkit docs why-it-does-not-learn`, or validate on more prompts",
    "worse": "; the last checkpoint is not better than the model that the run began with: see save.keep_best",
}
"""What follows a verdict."""


class Pace:
    """How long the steps that are left take, as the last ones did."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=RECENT)
        self._last: float | None = None

    def earlier(self, metrics: Mapping[str, float]) -> None:
        """Take a step of before a resume, by the times of its phases."""
        self._seconds.append(sum(metrics.get(f"time/{phase}", 0.0) for phase in PHASES))

    def step(self) -> None:
        """Take a step that is done; the first one of this process counts for nothing, since much is done once."""
        now = time.monotonic()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def time_left(self, steps: int) -> str | None:
        """Return the time that so many steps take; None if that is unknown."""
        return _clock(fmean(self._seconds) * steps) if self._seconds else None


class Unpadded:
    """A table without spaces at the end of its lines, which a terminal made narrower would fold."""

    def __init__(self, table: Table) -> None:
        self._table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for line in self.lines(console, options):
            yield from line
            yield Segment.line()

    def lines(self, console: Console, options: ConsoleOptions) -> list[list[Segment]]:
        """Return the segments of each line."""
        lines = console.render_lines(self._table, options, pad=False)
        for line in lines:
            while line and not line[-1].text.strip():
                line.pop()
            line[-1:] = [Segment(segment.text.rstrip(), segment.style) for segment in line[-1:]]
        return lines


class Display:
    """A `Reporter` for people: a table that changes with each step on a terminal, lines elsewhere.

    Args:
        steps: How many there will be.
        samples: Steps between completions that are shown; 0 for none, None for `SAMPLE_STEPS` on a terminal alone.
        quiet: Show nothing: on ranks other than 0.
    """

    def __init__(self, steps: int, samples: int | None = None, *, quiet: bool = False) -> None:
        # a notebook is none, whatever its environment says of colours: it gets lines
        self.console = Console(
            quiet=quiet, highlight=False, soft_wrap=True, force_jupyter=False, force_terminal=_on_terminal()
        )
        self.steps = steps
        self._sample_steps = samples if samples is not None else SAMPLE_STEPS * self.console.is_terminal
        self._start = time.monotonic()
        self._pace = Pace()
        self._rewards: deque[float] = deque(maxlen=RECENT)
        self._validations: list[tuple[int, dict[str, float]]] = []
        self._live: Live | None = None
        self._line_lengths: list[int] = []

    def note(self, text: str) -> None:
        self.console.print(cell(text), soft_wrap=not self.console.is_terminal)  # a terminal would break inside words

    def resumed(self, steps: Sequence[Mapping[str, float]]) -> None:
        for metrics in steps:
            self._pace.earlier(metrics)
            self._rewards += [metrics["reward/mean"]] if "reward/mean" in metrics else []

    def validated(self, number: int, metrics: dict[str, float]) -> None:
        self._validations.append((number, metrics))
        if number < self.steps:
            self.note(f"validation after {counted(number, 'step')}: {_validation(metrics)}")

    def step(self, number: int, metrics: dict[str, float]) -> None:
        self._pace.step()
        self._rewards += [metrics["reward/mean"]] if "reward/mean" in metrics else []
        time_left = self._pace.time_left(self.steps - number)
        if not self.console.is_terminal:
            suffix = f"  left {time_left}" if time_left else ""
            self.console.print(f"step {number}/{self.steps}  {_summary(metrics)}{suffix}")
            return
        if self._live is None:
            self._live = Live(console=self.console, auto_refresh=False)
            self._live.start()
        table = Unpadded(self._table(number, metrics, time_left))
        # the rows that a terminal made narrower has added to the last table; `Live` erases the others
        folded = sum((max(length, 1) - 1) // max(self.console.width, 1) for length in self._line_lengths)
        self.console.file.write("\r\x1b[2K\x1b[1A" * folded)
        self._live.update(table, refresh=True)
        self._line_lengths = [Segment.get_line_length(line) for line in table.lines(self.console, self.console.options)]

    def samples(self, number: int, trajectories: Sequence[Trajectory], count: int = 0) -> None:
        is_due = self._sample_steps and (number - 1) % self._sample_steps == 0
        for trajectory in differing_prompts(trajectories, count or int(is_due)):
            self.note(f"a sample of step {number}:\n{sample_text(trajectory)}")

    def finish(self, result: JsonObject, advice: str) -> None:
        if self._live is not None:
            self._live.stop()
        before, after = (result["validation"][when] or {} for when in ("before", "after"))
        if before and after:
            self.console.print(comparison(before, after))
        diagnosis, verdict = result.get("diagnosis"), result.get("verdict")
        warnings = [text for text in result.get("warnings") or [] if not repeats(text, diagnosis)]
        if warnings and result["steps"]:
            self.note(f"{counted(len(warnings), 'warning')} in this run:")
            for warning in warnings[:SHOWN_WARNINGS]:
                self.note(f"- {warning.partition(': ')[2] or warning}")
        if verdict is None and result.get("training_reward") and not diagnosis:
            self.note(_training_reward(result["training_reward"]))
        if diagnosis:
            self.console.print(Text(printable(diagnosis), style="bold red"))
        if verdict is not None:
            sentence = f"{Verdict(**verdict)}{'' if diagnosis else REMEDIES[verdict['change']]}"
            self.console.print(Text(sentence, style=STYLES[verdict["change"]]))
        is_worse = verdict is not None and verdict["change"] == "worse" and result["status"] == "ok"
        steps = counted(result["steps"], "step")
        status = "worse" if is_worse else result["status"]
        text = f"{status}: {steps} in {_clock(result['seconds'])}; {advice}"
        self.console.print(cell(text), soft_wrap=True)  # without further line breaks, as its commands are copied

    def _table(self, number: int, metrics: Mapping[str, float], time_left: str | None) -> Table:
        """Render the terminal's view after a step: progress, metrics, and time by phase."""
        table = Table.grid(padding=(0, 2))
        filled = round(BAR * number / max(self.steps, 1))
        passed = f"{_clock(time.monotonic() - self._start)} elapsed" + (f", {time_left} left" if time_left else "")
        rows = [("step", f"{'━' * filled}{'╌' * (BAR - filled)} {number}/{self.steps}  {passed}")]
        rows.append(("metrics", _summary(metrics)))
        if len(self._rewards) > 1:
            rows.append(("reward", f"{fmean(self._rewards):.3f}, mean of {counted(len(self._rewards), 'step')}"))
        rows.append(("time", _phases(metrics)))
        if self._validations:
            at, last = self._validations[-1]
            rows.append(("validation", f"{_validation(last)}, after step {at}"))
        memory = (("memory/rss_mb", "host"), ("memory/peak_device_mb", "device"))
        used = [f"{where} {metrics[name]:,.0f} MiB" for name, where in memory if name in metrics]
        rows.append(("memory", "  ".join(used)))
        for label, text in rows:
            table.add_row(Text(label, style="bold"), cell(text))
        return table


def _on_terminal() -> bool:
    try:
        return sys.stdout.isatty()
    except ValueError:  # it is closed
        return False


def comparison(before: dict[str, float], after: dict[str, float]) -> Table:
    """Return the table of validation metrics before and after training."""
    first, last = dict(metric_rows(before)), dict(metric_rows(after))
    rows = []
    for name, value in first.items():
        p_value = after.get(f"{name}_p_start")
        if not name.endswith(("failed", "unscored")) or before[name] or after.get(name):
            rows.append((name, value, last.get(name, "-"), "" if p_value is None else p_text(p_value)))
    compared = 4 if any(p_value for *_, p_value in rows) else 3
    return make_table(("validation", "before", "after", "p-value")[:compared], [row[:compared] for row in rows])


def _training_reward(change: RewardChange) -> str:
    """Describe the change of the mean reward of a run's own samples."""
    first, last = change["first"], change["last"]
    steps = counted(last["steps"], "step")
    return f"training reward {mean_text(first)} in the first {steps} -> {mean_text(last)} in the last"


def _phases(metrics: Mapping[str, float]) -> str:
    """Return the seconds of a step, and each phase's share."""
    seconds = {phase: metrics[f"time/{phase}"] for phase in PHASES if f"time/{phase}" in metrics}
    total = max(sum(seconds.values()), 1e-9)
    shares = "  ".join(f"{phase} {value / total:.0%}" for phase, value in seconds.items())
    return f"{total:.2f} s a step: {shares}"


def _validation(metrics: Mapping[str, float]) -> str:
    """Return the main metrics of a validation."""
    rows = dict(metric_rows(metrics))
    names = ("accuracy", "sampled_accuracy", "reward") if "accuracy" in rows else ("reward", "sampled_reward")
    texts = [f"{name} {rows[name]}" for name in (*names, "loss") if name in rows]
    return "  ".join(texts) or "no completion was scored"


def _summary(metrics: Mapping[str, float]) -> str:
    entries: dict[str, str] = {}
    for name, label, form in SHOWN:
        of_advantages = name == "policy/loss" and "advantage/abs_mean" in metrics  # which says nothing by itself
        if name in metrics and not of_advantages:
            entries.setdefault(label, f"{label} {metrics[name]:{form}}")
    return "  ".join(entries.values())


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
