"""A logger that a recipe lists: `log: {loggers: [{class_path: Sqlite, init_args: {file: metrics.db}}]}`.

[project.entry-points.rlkit]
sqlite = "rlkit_sqlite"
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping

from rlkit.base.names import FileName
from rlkit.hooks import Register, hookimpl
from rlkit.interfaces.callback import LoggedRun, Logger


class Sqlite(Logger):
    """A table of all metrics in the run folder.

    Args:
        file: Its name.
    """

    def __init__(self, file: FileName = "metrics.db") -> None:
        self.file = file

    def open(self, run: LoggedRun) -> None:
        """Open the table, without the steps that a resumed run makes again; rank 0 alone calls this."""
        self.table = sqlite3.connect(run.folder / self.file, isolation_level=None)
        self.table.execute("CREATE TABLE IF NOT EXISTS metrics (step INTEGER, name TEXT, value REAL)")
        self.table.execute("DELETE FROM metrics WHERE step > ?", (run.done,))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Write a step; all methods are called in one thread, for which the run does not wait."""
        self.table.executemany("INSERT INTO metrics VALUES (?, ?, ?)", [(step, *item) for item in metrics.items()])


@hookimpl
def rlkit_register(register: Register) -> None:
    register(Sqlite)
