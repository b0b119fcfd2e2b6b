"""JSON in the columns of rows: decoded strictly, so that a model learns what the data set says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import NoReturn

from rlkit.base.errors import RecipeError, show
from rlkit.types import JsonObject

LONGEST_JSON = 2**24
"""Most characters of a JSON text in a row."""

DEEPEST = 64
"""Most objects and lists inside one another."""


def decode(text: str, what: str) -> object:
    """Return the value of a JSON text.

    Args:
        text: The JSON text.
        what: The row and the column, with which a message begins.

    Raises:
        RecipeError: It is not JSON, is too long or too deep, repeats a key, or has a number that float64 cannot hold.
    """

    def refuse(problem: object) -> NoReturn:
        raise RecipeError(f"{what} is {show(text)}, expected JSON: {problem}")

    def constant(name: str) -> NoReturn:
        refuse(f"{name} is no JSON number")

    def number(digits: str) -> float:
        value = float(digits)
        return value if isfinite(value) else refuse(f"{digits[:40]} is beyond float64")

    def unique(pairs: list[tuple[str, object]]) -> JsonObject:
        fields = dict(pairs)
        if len(fields) < len(pairs):
            keys = [key for key, _ in pairs]
            refuse(f"the key {show(next(key for key in keys if keys.count(key) > 1))} is repeated")
        return fields

    if len(text) > LONGEST_JSON:
        refuse(f"it has {len(text):,} characters, at most {LONGEST_JSON:,} are read")
    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant, parse_float=number)
    except RecursionError:
        refuse(f"it has far more than {DEEPEST} levels")
    except ValueError as error:  # also for integers of thousands of digits
        refuse(f"{error}; write it with json.dumps")


def cleaned(value: object, what: str, *, keep_nulls: bool, depth: int = 0) -> tuple[object, bool]:
    """Return a value as plain JSON data, and whether fields that are null were left out.

    Args:
        value: Objects, lists, texts and numbers; also those of NumPy.
        what: The row and the column, with which a message begins.
        keep_nulls: Whether a field that is null stays. Elements of lists always do.
        depth: Number of objects and lists around it.

    Raises:
        RecipeError: It is too deep, or holds something that is no JSON: NaN, half of a surrogate pair, an object.
    """
    if isinstance(value, str):
        return checked_text(value, what), False
    if value is None or isinstance(value, bool | int):
        return value, False
    if isinstance(value, float):
        if not isfinite(value):
            raise RecipeError(f"{what} holds {value}, expected a finite number; leave the field out instead")
        return value, False
    if depth > DEEPEST:
        raise RecipeError(f"{what} has more than {DEEPEST} levels, expected fewer")
    if isinstance(value, Mapping):
        fields = {str(key): item for key, item in value.items() if keep_nulls or item is not None}
        parts = {key: cleaned(item, what, keep_nulls=keep_nulls, depth=depth + 1) for key, item in fields.items()}
        return (
            {key: item for key, (item, _) in parts.items()},
            len(fields) < len(value) or any(dropped for _, dropped in parts.values()),
        )
    if isinstance(value, list | tuple):
        items = [cleaned(item, what, keep_nulls=keep_nulls, depth=depth + 1) for item in value]
        return [item for item, _ in items], any(dropped for _, dropped in items)
    if hasattr(value, "tolist"):
        return cleaned(value.tolist(), what, keep_nulls=keep_nulls, depth=depth + 1)
    raise RecipeError(f"{what} holds {show(value)}, expected JSON data")


def checked_text(text: str, what: str) -> str:
    """Return a text that UTF-8 can hold.

    Raises:
        RecipeError: It has half of a surrogate pair.
    """
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError as error:
        surrogate = text[error.start : error.end]
        raise RecipeError(
            f"{what} holds {surrogate!a}, half of a surrogate pair, which is not valid text; remove it"
        ) from error
    return text
