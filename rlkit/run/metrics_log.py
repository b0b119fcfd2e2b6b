"""A run's metrics: `metrics.jsonl`, and the recipe's loggers, each in its own thread: none can delay or end the run."""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError, explain_foreign
from rlkit.base.text import part_name, redact_arguments
from rlkit.interfaces.callback import LoggedRun, Logger
from rlkit.records.folder import write_atomically
from rlkit.records.lines import nine_digits, read_lines
from rlkit.records.rewards import RewardHistory
from rlkit.run.answers import answers_to_log

if TYPE_CHECKING:
    from rlkit.run.evaluate import Evaluation

OPEN_SECONDS = 60.0
"""How long a run waits for a logger to open before it starts without it; the logger may still open later."""
CLOSE_SECONDS = 30.0
"""How long the end of a run waits for a logger to finish."""
BACKLOG = 1000
"""Steps that are queued for a slow logger; later steps are dropped and counted."""

Call = Callable[[], None]


class LoggerThread:
    """Calls a logger, whose failures become warnings.

    Args:
        logger: The recipe's logger.
        note: Function that shows a warning; called from the run's own thread.
    """

    def __init__(self, logger: Logger, note: Callable[[str], None]) -> None:
        self.logger = logger
        self.note = note
        self._calls: queue.Queue[tuple[str, Call] | None] = queue.Queue(BACKLOG)
        self._problems: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._failed = self._dropped = 0
        self._thread = threading.Thread(target=self._run, name=f"rlkit-{type(logger).__name__}", daemon=True)
        self._thread.start()

    def open(self, run: LoggedRun, timeout: float = OPEN_SECONDS) -> None:
        """Open the logger.

        Raises:
            RecipeError: The logger's package is not installed, or its options cannot be used.
        """
        refused: Future[RecipeError | None] = Future()

        def work() -> None:
            try:
                self.logger.open(run)
            except RecipeError as error:
                refused.set_result(error)
            finally:
                if not refused.done():
                    refused.set_result(None)

        self._put("open", work)
        try:
            error = refused.result(timeout)
        except TimeoutError:
            self.note(f"warning: logger {part_name(self.logger)} is not open after {timeout:g} s; the run continues")
            return
        if error is not None:
            raise error
        self._show()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Queue a step's metrics for the logger."""
        self._put("log_metrics", lambda: self.logger.log_metrics(metrics, step))
        self._show()

    def log_answers(self, answers: Sequence[Mapping[str, str | float | None]], step: int) -> None:
        """Queue completions of a validation for the logger."""
        self._put("log_answers", lambda: self.logger.log_answers(answers, step))

    def finalize(self, status: str, timeout: float = CLOSE_SECONDS) -> None:
        """End the logger once all is logged; the status is `success` or `failed`."""
        self._put("finalize", lambda: self.logger.finalize(status))
        with suppress(queue.Full):
            self._calls.put_nowait(None)
        self._thread.join(timeout)
        self._show()
        name = part_name(self.logger)
        if self._thread.is_alive():
            self.note(f"warning: logger {name} has not ended after {timeout:g} s; the rest of its queue is lost")
        if self._failed > 1 or self._dropped:
            self.note(f"warning: logger {name} failed {self._failed} times and missed {self._dropped} steps")

    def _put(self, method: str, call: Call) -> None:
        if not self._thread.is_alive():  # it could not be opened
            return
        try:
            self._calls.put_nowait((method, call))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while (queued := self._calls.get()) is not None:
            method, call = queued
            try:
                call()
            except (Exception, SystemExit) as error:  # foreign code may raise anything
                self._failed += 1
                if self._failed == 1:
                    self._problems.put(f"logger {part_name(self.logger)}: `{method}` raised {explain_foreign(error)}")
                if method == "open":
                    return

    def _show(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.note(f"warning: {self._problems.get_nowait()}")


def open_loggers(loggers: Sequence[Logger], run: LoggedRun, note: Callable[[str], None]) -> list[LoggerThread]:
    """Open the loggers of a recipe; from here on `sys.argv` has no credentials.

    Raises:
        RecipeError: A logger's package is not installed, or its options cannot be used.
    """
    sys.argv = redact_arguments(sys.argv)  # trackers upload it, some from threads of their own
    threads = [LoggerThread(logger, note) for logger in loggers]
    for thread in threads:
        thread.open(run)
    return threads


MAX_EARLIER = 50
"""Lines before a resume whose metrics are shown."""
MEASURED = ("time/", "memory/")
"""Metrics of clocks and of memory, written with four digits: they never repeat more exactly."""


class MetricsLog:
    """Appends a JSON object per step to `metrics.jsonl`, and passes the same metrics to loggers.

    Args:
        path: Path of `metrics.jsonl`.
        loggers: The loggers, from `open_loggers`.
        last_step: Last step whose line is kept; a resumed run repeats later steps.
    """

    def __init__(self, path: Path, loggers: Sequence[LoggerThread], last_step: int = 0) -> None:
        lines = [line for step, line in _steps(path) if step <= last_step]
        write_atomically(path, "".join(f"{line}\n" for line in lines).encode())
        self.earlier = [_metrics(line) for line in lines[-MAX_EARLIER:]]
        """The metrics of the last lines before a resume."""
        self.rewards = RewardHistory()
        """The rewards of all lines before a resume."""
        for line in lines:
            self.rewards.see(_metrics(line))
        self._path = path
        self._size = path.stat().st_size
        self._unwritten: list[str] = []
        self._loggers = loggers

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write a step's metrics.

        Raises:
            OSError: The file cannot be written, for example on a full disk; its lines are written next time.
        """
        line = {name: _as_written(name, x) for name, x in metrics.items()}
        self._unwritten.append(json.dumps({"step": step, **line}, separators=(",", ":")) + "\n")
        try:
            self._flush()
        finally:
            for logger in self._loggers:
                logger.log_metrics(metrics, step)

    def answers(self, step: int, evaluation: Evaluation) -> None:
        """Pass a validation's first completions to the loggers."""
        if self._loggers:
            rows = answers_to_log(evaluation)
            for logger in self._loggers:
                logger.log_answers(rows, step)

    def close(self, status: str) -> None:
        """Write the last lines, and close the loggers with the state `success` or `failed`."""
        try:
            self._flush()
        finally:
            for logger in self._loggers:
                logger.finalize("success" if status == "ok" else "failed")

    def _flush(self) -> None:
        text = "".join(self._unwritten).encode()
        if not text:
            return
        try:
            with self._path.open("ab") as file:
                file.write(text)
        except OSError:
            os.truncate(self._path, self._size)  # removes a partial line
            raise
        self._size += len(text)
        self._unwritten.clear()


def _as_written(name: str, value: float) -> float:
    """Return a metric with nine digits or, if it is measured, four; an integer without a point."""
    value = float(f"{value:.4g}") if name.startswith(MEASURED) else nine_digits(value)
    return int(value) if abs(value) < 1e15 and value % 1 == 0 else value


def _metrics(line: str) -> dict[str, float]:
    fields = json.loads(line).items()
    return {name: value for name, value in fields if isinstance(value, int | float) and abs(value) < 1e300}


def _steps(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the steps and lines of a file of metrics in order, without truncated lines of killed processes."""
    if not os.path.exists(path):
        return
    last = 0
    for _, content in read_lines(path):
        line = content.decode(errors="replace").rstrip("\n")
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(step) is int and step > last:
            last = step
            yield step, line
