"""Rows of tables, each with its location."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlkit.interfaces.rows import LocatedRow
from rlkit.types import Row

CHUNK = 256
"""Rows that are decoded at once where they are read in order."""


class Table(Sequence[Row]):
    """The rows of several tables, which stay on disk until they are asked for.

    Args:
        tables: Tables of `datasets`, `TextRows`, or lists, with the names of their files.
        chosen: The rows that there are, by their numbers in all tables; None for all.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], chosen: NDArray[np.int64] | None = None) -> None:
        self.tables = tables
        self.chosen = chosen
        self._ends = list(accumulate(len(rows) for _, rows in tables))
        self._decoded: tuple[int, int, list[Row]] = (-1, 0, [])

    def __len__(self) -> int:
        return self._ends[-1] if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = index if self.chosen is None else int(self.chosen[index])
        part = bisect_right(self._ends, number)
        name, rows = self.tables[part]
        within = number - (self._ends[part] - len(rows))
        if not hasattr(rows, "features"):
            return rows[within]  # type: ignore[no-any-return]
        return LocatedRow.at(f"{name}, row {within + 1}", self._decode(part, within))

    def _decode(self, part: int, within: int) -> Row:
        """Return a row of a table, with those after it if the one before was the last that was asked for."""
        last_part, first, rows = self._decoded
        offset = within - first
        if last_part != part or not 0 <= offset < len(rows):
            follows = last_part == part and offset == len(rows)
            columns = self.tables[part][1][within : within + (CHUNK if follows else 1)]
            rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            self._decoded, offset = (part, within, rows), 0
        return rows[offset]

    def select(self, chosen: NDArray[np.int64]) -> Table:
        """Return the table of some of the rows."""
        return Table(self.tables, chosen if self.chosen is None else np.asarray(self.chosen)[chosen])
