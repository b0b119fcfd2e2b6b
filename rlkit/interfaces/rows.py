"""Rows of data: their locations, their columns, and texts with columns in them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from string import Formatter
from typing import Any

from rlkit.base.errors import RecipeError, show
from rlkit.types import Row

TASK, INDEX, ROW = "task", "index", "row"
"""The keys of a row of a task that mixes the rows of others."""
LABELS = {"true": 1.0, "1": 1.0, "1.0": 1.0, "false": 0.0, "0": 0.0, "0.0": 0.0}
"""The rewards of a completion that a row labels as right or wrong."""


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


def location_of(row: Row, otherwise: str) -> str:
    """Return the location of a row, or `otherwise` if it is unknown."""
    return row.location if isinstance(row, LocatedRow) else otherwise


def field_of(row: Row, name: str) -> object:
    """Return the value of a column; `a.b` is the field `b` of the column `a`, unless a column has this name.

    Raises:
        KeyError: There is none.
    """
    if name in row:
        return row[name]
    value: object = row
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise KeyError(name)
        value = value[key]
    return value


def label_of(value: object) -> float | None:
    """Return 1 or 0 for a label that is true or false, perhaps as a text; None for any other, such as a class."""
    return LABELS.get(str(value).strip().lower())


def column(row: Row, name: str, location: str, option: str) -> object:
    """Return the value of a column; `a.b` is the field `b` of the column `a`, unless a column has this name.

    Raises:
        RecipeError: There is none; the message lists the columns of the row.
    """
    try:
        return field_of(row, name)
    except KeyError:
        listed = ", ".join(_names(row)) or "nothing"
        raise RecipeError(f"{location}: no field {show(name)} ({option}); the row has: {listed}") from None


def _names(row: Row, prefix: str = "") -> Iterator[str]:
    """Return the names of all columns, with the fields inside them."""
    for name, value in row.items():
        yield f"{prefix}{name}"
        if isinstance(value, Mapping) and prefix.count(".") < 2:
            yield from _names(value, f"{prefix}{name}.")


class TextTemplate:
    """A text with columns in it: `{question}\\nAnswer with ####`; braces of the text itself are doubled.

    Args:
        text: Columns in braces; `{a.b}` is the field `b` inside `a`. Nothing else may be in them: no code runs.
        option: Where the text is from, for messages.

    Raises:
        RecipeError: It is no such text, or names no column.
    """

    def __init__(self, text: str, option: str = "task.template") -> None:
        self.option = option
        try:
            self.parts = [*Formatter().parse(text)]
        except ValueError as error:
            raise RecipeError(f"{option} is {show(text)}: {error}; write {{{{ and }}}} for braces") from error
        self.names = [name for _, name, _, _ in self.parts if name is not None]
        if not all(self.names) or any(form or change for _, _, form, change in self.parts):
            raise RecipeError(f"{option} is {show(text)}, expected only names of columns in braces")
        if not self.names:
            raise RecipeError(f"{option} is {show(text)}, expected a column in it, such as {{question}}")

    def fill(self, row: Row, location: str) -> str:
        """Return the text for a row.

        Raises:
            RecipeError: The row has no such column, or it is null.
        """
        pieces = [(literal, self._column(row, name, location) if name else "") for literal, name, _, _ in self.parts]
        return "".join(literal + value for literal, value in pieces)

    def _column(self, row: Row, name: str, location: str) -> str:
        text = as_text(column(row, name, location, self.option))
        if text is None:
            raise RecipeError(f"{location}: {name!r} is null, but {self.option} needs it")
        return text


def as_text(answer: object) -> str | None:
    """Return an answer as text: lists and objects as JSON; NaN stands for none in tables of numbers."""
    if isinstance(answer, float) and math.isnan(answer):
        return None
    if answer is None or isinstance(answer, str):
        return answer
    return json.dumps(answer, ensure_ascii=False, default=str) if isinstance(answer, list | dict) else str(answer)
