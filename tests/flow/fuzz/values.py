"""Values that options are spoiled with, and which of them are legal."""

from __future__ import annotations

from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import yaml

VALUES: dict[str, Any] = {
    "null": None,
    "nan": float("nan"),
    "inf": float("inf"),
    "-inf": float("-inf"),
    "1e40": 1e40,
    "-1e40": -1e40,
    "-5": -5,
    "-0.5": -0.5,
    "0": 0,
    "2.5": 2.5,
    "999999999999": 999999999999,
    "10**25": 10**25,
    "true": True,
    "false": False,
    "text": "nosuch",
    "number as text": "0.25",
    "empty text": "",
    "long text": "x" * 100_000,
    "list": [1, 2],
    "empty list": [],
    "mapping": {"a": 1},
    "empty mapping": {},
    "class": {"class_path": "GRPO"},
    "path": "/dev/zero",
    "folder": "/proc",
    "dict_kwargs": {"dict_kwargs": {"a": 1}},
    "nested": {"a": {"b": [{"c": [None, float("nan")]}]}},
    "NUL": "a\0b",
    "surrogate": "\ud800",
    "import": "os.system",
    "import number": "builtins.int",
    "date": "2024-13-45",
}


def reason(option: str, old: Any, name: str, override: bool) -> str | None:
    """Return why a value (by its name in VALUES) is legal for an option, None if it must be refused.

    Args:
        option: Its name in `legal.yaml`.
        old: Its value in the legal recipe.
        name: The value's name.
        override: Whether it is set by the command line, where a text may stand for any value.
    """
    empty = name == "empty text" and (override or isinstance(old, dict | list))
    new = None if empty else VALUES[name]
    if name in (_stated("also", option) or {}):
        return str(_stated("also", option)[name])
    if _listed("any", option):
        return "any value"
    if override and _listed("text", option):
        return "a text, as all of the command line"
    if new is None:
        return "null is legal there" if _listed("nullable", option) else None
    if _listed("text", option):
        return "a text" if isinstance(new, str) else None
    if isinstance(old, bool):
        return "a truth value" if isinstance(new, bool) else None
    if isinstance(old, int | float):
        return _reason_of_number(option, old, float(new) if name == "number as text" else new)
    if new == {} and (override or _listed("empty", option)):
        return "all options at their defaults, or merged with the recipe's"
    return None


def _reason_of_number(option: str, old: float, new: Any) -> str | None:
    if not isinstance(new, int | float) or isinstance(new, bool):
        return None
    if isinstance(old, int) and new % 1:  # infinity, too
        return None
    low, high = _stated("range", option) or ([1, 2**31 - 1] if isinstance(old, int) else [0.1, 1e30])
    return "a number in its range" if low <= new <= high else None


@cache
def statements() -> dict[str, Any]:
    """Return what is stated as legal, by its kind."""
    table: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "legal.yaml").read_text())
    return table


@cache
def _listed(kind: str, option: str) -> bool:
    return any(fnmatchcase(option, pattern) for pattern in statements()[kind])


@cache
def _stated(kind: str, option: str) -> Any:
    """Return what a table states for an option, by the first pattern that fits; None if it states nothing."""
    return next((value for pattern, value in statements()[kind].items() if fnmatchcase(option, pattern)), None)


def reason_of_column(column: str, name: str) -> str | None:
    """Return why a value, by its name, is legal in a column of a row, None if it must be refused."""
    legal = _stated("columns", column) or []
    return "a value that the column may have" if legal == "any" or name in legal else None
