"""`rlkit sweep`: a run for each combination of options' values, one after another."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import FrameType

from rlkit.base.errors import INTERRUPTED, RecipeError
from rlkit.base.files import MAX_JSON_BYTES, read_inside
from rlkit.base.terminal import echo, show
from rlkit.base.text import redact, redact_option
from rlkit.commands import CommandLine, parse, split
from rlkit.records.folder import output_path
from rlkit.records.rewards import mean_text
from rlkit.records.validation_metrics import metric_rows
from rlkit.records.verdict import VERDICT_METRICS, merit
from rlkit.types import JsonObject

USAGE = """usage: rlkit sweep --recipe NAME --SECTION.OPTION=VALUE,VALUE,... --out FOLDER [--json]
    trains with each combination of the values as a run of its own in FOLDER, one after another, and prints their
    validations, the best first: by accuracy or reward, without validation by training reward; repeated, the command
    keeps finished runs, and resumes interrupted ones
    a comma in brackets, or in a value with quotes of its own, is part of a value: --reward.pattern='"a,b",c'
    --json   print the results as JSON, and what the runs print to stderr
    exit status: 0 if all runs have ended well, 1 if one failed, 130 after Ctrl-C, which saves the run in progress
"""
OPTIONS = (
    ("--out", {"type": str, "help": "The folder of the runs."}),
    ("--json", {"action": "store_true", "help": "Print the results as JSON."}),
)
TRAINING_REWARD = "training reward"
"""What runs without validation are compared by: the mean reward of their own samples, of the first and last steps."""
LONGEST_NAME = 150
"""Characters of a run folder's name, without the digest of a longer one."""


@dataclass
class SweepRun:
    """A run of a sweep.

    Args:
        options: The values of the options that differ between runs, without credentials.
        words: The arguments of `rlkit fit`.
        folder: The run folder.
    """

    options: dict[str, str]
    words: list[str]
    folder: Path
    recipe: str = ""
    """Text of its recipe, with every option filled in."""
    watch: str = "accuracy"
    status: str = "not started"
    error: str | None = None
    result: JsonObject = field(default_factory=dict)

    def check(self) -> None:
        """Parse the recipe, and read the result of an earlier sweep if it is that of this recipe."""
        try:
            parsed = parse("sweep", self.words, trains=True)
        except RecipeError as error:
            self.status, self.error = "failed", redact(str(error))
            return
        self.recipe = parsed.yaml
        if parsed.recipe.validation is not None:
            self.watch = parsed.recipe.validation.watch
        result = _read(self.folder / "result.json")
        is_ok = result.get("status") == "ok"
        if is_ok and read_inside(self.folder, "recipe.yaml", MAX_JSON_BYTES).decode() == self.recipe:
            self.status, self.result = "ok", result

    def validation(self, when: str) -> Mapping[str, float]:
        """Return the metrics of a validation; none if it was not made."""
        return (self.result.get("validation") or {}).get(when) or {}

    def score(self, when: str, metric: str) -> tuple[float, str]:
        """Return the merit of a metric of a validation, or of the training reward, and its text with the interval."""
        if metric == TRAINING_REWARD:
            change = self.result.get("training_reward")
            reward = change and change["first" if when == "before" else "last"]
            return (reward["mean"], mean_text(reward)) if reward else (float("-inf"), "-")
        metrics = self.validation(when)
        value = merit(metric, metrics[metric]) if metric in metrics else float("-inf")
        return value, dict(metric_rows(metrics)).get(metric, "-")

    @property
    def status_text(self) -> str:
        """The status, with the error of a failed run, or why it had nothing to learn from."""
        reason = self.error or str(self.result.get("diagnosis") or "").partition(": ")[0]
        return f"{self.status}: {reason}" if reason else self.status

    def as_json(self) -> JsonObject:
        """Return the run as `--json` prints it."""
        names = ("steps", "seconds", "validation", "verdict", "training_reward", "diagnosis")
        about = {"options": self.options, "folder": str(self.folder), "status": self.status, "error": self.error}
        return about | {name: self.result.get(name) for name in names}


class SignalForwarder:
    """Forwards signals to the process of the run in progress, which then finishes its step and saves it.

    The process has its own process group, so that it receives a terminal's Ctrl-C once, from here.
    """

    def __init__(self) -> None:
        self.asked: int | None = None
        self._process: subprocess.Popen[str] | None = None

    def attach(self, process: subprocess.Popen[str]) -> None:
        """Set the process that receives signals, including one that arrived while it was starting."""
        self._process = process
        if self.asked is not None:
            process.send_signal(self.asked)

    def _receive(self, number: int, _: FrameType | None) -> None:
        self.asked = number
        if self._process is not None:
            self._process.send_signal(number)

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals that end a program, except those that are ignored, as under nohup."""
        numbers = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        before = [signal.signal(number, self._receive) for number in numbers]
        try:
            yield
        finally:
            for number, handler in zip(numbers, before, strict=True):
                signal.signal(number, handler)


def run(argv: Sequence[str]) -> int:
    """Train with each combination; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    line = split(argv, OPTIONS)
    if line.problems or line.help or not line.recipes:
        parse("sweep", argv, OPTIONS)  # raises, or prints the help of a section
    runs = _runs(line)
    for sweep_run in runs:
        sweep_run.check()
    if all(sweep_run.error for sweep_run in runs):
        raise RecipeError(runs[0].error or "")
    signals, as_json = SignalForwarder(), bool(line.options.json)
    with signals.handled():
        for number, sweep_run in enumerate(runs, 1):
            if signals.asked is None and sweep_run.status == "not started":
                echo(f"run {number} of {len(runs)}: {sweep_run.folder}", error=as_json)
                _train(sweep_run, signals, as_json)
    _show(runs, as_json)
    if signals.asked is not None:
        return INTERRUPTED
    return int(any(sweep_run.status != "ok" for sweep_run in runs))


def _runs(line: CommandLine) -> list[SweepRun]:
    """Return a run for each combination of the options' values.

    Raises:
        RecipeError: There is no folder, or no option with several values.
    """
    if line.options.out is None:
        raise RecipeError("rlkit sweep needs --out FOLDER, the folder of its runs")
    out, values = output_path(line.options.out), {key: values_of(key, text) for key, text in line.overrides}
    varied = [key for key in values if len(values[key]) > 1]
    if not varied:
        raise RecipeError("rlkit sweep has no option with several values, expected one such as --train.seed=0,1")
    recipes, runs = [f"--recipe={recipe}" for recipe in line.recipes], []
    for combination in product(*values.values()):
        options = dict(zip(values, combination, strict=True))
        differing = {key: options[key] for key in varied}
        shown = {key: redact_option(key, value) for key, value in differing.items()}
        words = [*recipes, *(f"--{key}={value}" for key, value in options.items())]
        runs.append(SweepRun(shown, words, out / name_of(differing)))
    return runs


def values_of(key: str, text: str) -> list[str]:
    """Return the values that commas separate, each once; not those in brackets, or in a value with quotes.

    Raises:
        RecipeError: A value is empty.
    """
    values, depth, quote = [""], 0, ""
    for letter in text:
        if letter == "," and not depth and not quote:
            values.append("")
            continue
        if letter in "'\"" and letter == quote:
            quote = ""
        elif letter in "'\"" and not values[-1].strip():
            quote = letter
        elif not quote:
            depth += (letter in "[{(") - (letter in "]})")
        values[-1] += letter
    values = [value.strip() for value in values]
    if len(values) > 1 and "" in values:
        raise RecipeError(f"--{key} is {text!r}, expected values between its commas")
    return list(dict.fromkeys(values))


def name_of(options: dict[str, str]) -> str:
    """Return the name of a run's folder: its options, with a digest where they cannot be a name as they are."""
    text = ",".join(f"{key}={value}" for key, value in options.items())
    shown = ",".join(f"{key}={redact_option(key, value)}" for key, value in options.items())
    name = re.sub(r"[^\w.,=+-]", "-", shown)[:LONGEST_NAME]
    return name if name == text else f"{name}-{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


def _train(sweep_run: SweepRun, signals: SignalForwarder, as_json: bool) -> None:
    """Run `rlkit fit` in a process of its own, and set the status, the error and the result."""
    command = (sys.executable, "-m", "rlkit", "fit", *sweep_run.words, f"--out={sweep_run.folder}", "--resume=auto")
    lines: deque[str] = deque(maxlen=100)
    sys.stdout.flush()
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.__stderr__ if as_json else None,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        process_group=0,
    ) as process:
        signals.attach(process)
        for text in process.stderr or ():
            print(text, end="", file=sys.stderr, flush=True)
            lines.append(text)
    if process.returncode == 0:
        sweep_run.status, sweep_run.result = "ok", _read(sweep_run.folder / "result.json")
    elif signals.asked is not None or process.returncode == INTERRUPTED:
        sweep_run.status = "interrupted"
    else:
        sweep_run.status, sweep_run.error = "failed", _error(process.returncode, "".join(lines))


def _error(status: int, text: str) -> str:
    """Return the error that a process printed last, or how it ended."""
    _, separator, message = text.rpartition("error: ")
    if separator:
        return message.strip()
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _read(path: Path) -> JsonObject:
    """Return a JSON file; empty if there is none."""
    try:
        content: JsonObject = json.loads(read_inside(path.parent, path.name, MAX_JSON_BYTES))
    except (OSError, ValueError):
        return {}
    return content


def _show(runs: Sequence[SweepRun], as_json: bool) -> None:
    """Print the runs, the best first."""
    metric = _compared(runs)
    ranked = sorted(runs, key=lambda sweep_run: -sweep_run.score("after", metric)[0])
    if as_json:
        print(json.dumps([sweep_run.as_json() for sweep_run in ranked]))
        return
    header = (*runs[0].options, "steps", f"{metric} before", "after", "status")
    show(
        header,
        [
            (
                *sweep_run.options.values(),
                str(sweep_run.result.get("steps", "-")),
                sweep_run.score("before", metric)[1],
                sweep_run.score("after", metric)[1],
                sweep_run.status_text,
            )
            for sweep_run in ranked
        ],
    )


def _compared(runs: Sequence[SweepRun]) -> str:
    """Return the metric by which runs are compared: what validation watches, or one that all runs have instead.

    Runs of which none was validated are compared by their training reward.
    """
    validated = [sweep_run.validation("after") for sweep_run in runs if sweep_run.validation("after")]
    candidates = (runs[0].watch, *VERDICT_METRICS, "loss")
    if not validated and any(sweep_run.result.get("training_reward") for sweep_run in runs):
        return TRAINING_REWARD
    return next((name for name in candidates if validated and all(name in m for m in validated)), runs[0].watch)
