"""Texts with columns in them, and columns as text."""

from __future__ import annotations

import json
import math
from string import Formatter

from rlkit.base.errors import RecipeError, show
from rlkit.tasks import sources
from rlkit.types import Row


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
        text = as_text(sources.column(row, name, location, self.option))
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
