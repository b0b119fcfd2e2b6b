"""A run's metrics: `metrics.jsonl`, and the loggers of the recipe."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.run.answers import answers_to_log
from rlkit.run.folder import write_whole
from rlkit.run.loggers import LoggerThread
from rlkit.train.validation.evaluate import Evaluation

EARLIER = 50


class MetricsLog:
    """Appends a JSON object per step to `metrics.jsonl`, and passes the same metrics to loggers.

    Args:
        path: The file.
        loggers: From `open_loggers`.
        done: The last step whose line is kept; a resumed run repeats later ones.
    """

    def __init__(self, path: Path, loggers: Sequence[LoggerThread], done: int = 0) -> None:
        lines = [line for step, line in _steps(path) if step <= done]
        write_whole(path, "".join(f"{line}\n" for line in lines).encode())
        self.earlier = [_metrics(line) for line in lines[-EARLIER:]]
        """The metrics of the last lines that were kept."""
        self._path = path
        self._size = path.stat().st_size
        self._unwritten: list[str] = []
        self._loggers = loggers

    def write(self, step: int, metrics: dict[str, float]) -> None:
        """Write a step's metrics.

        Raises:
            OSError: The file cannot be written, as where the disk is full; its lines are kept for the next time.
        """
        self._unwritten.append(json.dumps({"step": step, **metrics}) + "\n")
        try:
            self._flush()
        finally:
            for logger in self._loggers:
                logger.log_metrics(metrics, step)

    def answers(self, step: int, found: Evaluation) -> None:
        """Pass some answers of a validation to the loggers."""
        if self._loggers:
            some = answers_to_log(found)
            for logger in self._loggers:
                logger.log_answers(some, step)

    def close(self, status: str) -> None:
        """Close the file and the loggers, whose only states are `success` and `failed`."""
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
            os.truncate(self._path, self._size)  # no half line may stay
            raise
        self._size += len(text)
        self._unwritten.clear()


def _metrics(line: str) -> dict[str, float]:
    known = json.loads(line).items()
    return {name: value for name, value in known if isinstance(value, int | float) and abs(value) < 1e300}


def _steps(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of a file of metrics with their steps, in order, skipping truncated lines of killed processes."""
    last = 0
    for line in path.read_text(encoding="utf-8", errors="replace").split("\n") if os.path.exists(path) else ():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError, RecursionError):
            continue
        if type(step) is int and step > last:
            last = step
            yield step, line
