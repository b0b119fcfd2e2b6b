"""A table of metrics in the run folder."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path

from rlkit.base.names import FileName
from rlkit.interfaces.callback import LoggedRun, Logger


class CSV(Logger):
    """A table in the run folder with a column for each metric; a resumed run keeps its rows, unlike with Lightning's.

    Args:
        file: Name of the file.
    """

    def __init__(self, file: FileName = "metrics.csv") -> None:
        self.file = file
        self._complete = False

    def open(self, run: LoggedRun) -> None:
        """Read the rows of the completed steps."""
        self._path = run.folder / self.file
        self._rows = [row for row in _read(self._path) if _step(row) <= run.done]
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row)) or ["step"]
        self._rewrite()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a row; rewrite the table if the row has new columns."""
        row = {"step": str(step), **{name: str(value) for name, value in metrics.items()}}
        self._rows.append(row)
        new_columns = [name for name in row if name not in self._columns]
        self._columns += new_columns
        if new_columns or not self._complete:
            self._rewrite()
            return
        self._complete = False
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)
        self._complete = True

    def finalize(self, status: str) -> None:
        """Write the rows that could not be written before, for example because the disk was full."""
        if not self._complete:
            self._rewrite()

    def _rewrite(self) -> None:
        self._complete = False
        partial = self._path.with_suffix(".partial")
        try:
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(self._rows)
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._complete = True


def _read(path: Path) -> list[dict[str, str]]:
    if not os.path.isfile(path):
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]


def _step(row: Mapping[str, str]) -> float:
    """Return a row's step; infinity for a row without one, which a killed process truncated."""
    text = row.get("step", "")
    return int(text) if text.isdecimal() else float("inf")
