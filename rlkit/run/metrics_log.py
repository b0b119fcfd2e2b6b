"""A run's metrics: `metrics.jsonl`, and the loggers of the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.run.answers import answers_to_log
from rlkit.run.evaluate import Evaluation
from rlkit.run.folder import write_atomically
from rlkit.run.loggers import LoggerThread

MAX_EARLIER = 50
"""Lines before a resume whose metrics are shown."""


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
        self._path = path
        self._size = path.stat().st_size
        self._unwritten: list[str] = []
        self._loggers = loggers

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write a step's metrics.

        Raises:
            OSError: The file cannot be written, for example on a full disk; its lines are written next time.
        """
        self._unwritten.append(json.dumps({"step": step, **metrics}) + "\n")
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


def _metrics(line: str) -> dict[str, float]:
    fields = json.loads(line).items()
    return {name: value for name, value in fields if isinstance(value, int | float) and abs(value) < 1e300}


def _steps(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the steps and lines of a file of metrics in order, without truncated lines of killed processes."""
    if not os.path.exists(path):
        return
    last = 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n"):
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(step) is int and step > last:
            last = step
            yield step, line
