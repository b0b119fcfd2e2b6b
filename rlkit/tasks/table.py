"""Rows of tables, each with its location."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from rlkit.types import Row

CHUNK = 256
"""Rows that are decoded at once."""


class LocatedRow(dict[str, Any]):
    """A row that knows where it is: `data/a.parquet, row 7`, counted from 1."""

    location: str
    as_written: bool = False
    """Whether nulls are those of the data set, not those that a table has for missing fields."""

    @classmethod
    def at(cls, location: str, row: Row) -> LocatedRow:
        """Return the row with its location."""
        located = cls(row)
        located.location = location
        return located


class Table(Sequence[Row]):
    """The rows of several tables, which stay on disk until they are asked for.

    Args:
        tables: Tables of `datasets`, or lists of located rows, with the names of their files.
        chosen: The rows that there are, by their numbers in all tables; None for all.
    """

    def __init__(self, tables: Sequence[tuple[str, Any]], chosen: Sequence[int] | None = None) -> None:
        self.tables = tables
        self.chosen = chosen
        self._ends = list(accumulate(len(rows) for _, rows in tables))
        self._decoded: tuple[int, int, list[Row]] = (-1, 0, [])

    def __len__(self) -> int:
        return self._ends[-1] if self.chosen is None else len(self.chosen)

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = index if self.chosen is None else self.chosen[index]
        part = bisect_right(self._ends, number)
        name, rows = self.tables[part]
        within = number - (self._ends[part] - len(rows))
        if isinstance(rows, list):
            return rows[within]  # type: ignore[no-any-return]
        first = within - within % CHUNK
        if self._decoded[:2] != (part, first):
            columns = rows[first : first + CHUNK]
            decoded: list[Row] = [
                dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
            ]
            self._decoded = (part, first, decoded)
        return LocatedRow.at(f"{name}, row {within + 1}", self._decoded[2][within - first])

    def select(self, chosen: Sequence[int]) -> Table:
        """Return the table of some of the rows."""
        return Table(self.tables, chosen if self.chosen is None else [self.chosen[i] for i in chosen])


def location_of(row: Row, otherwise: str) -> str:
    """Return the location of a row; None if it is unknown."""
    return row.location if isinstance(row, LocatedRow) else otherwise
