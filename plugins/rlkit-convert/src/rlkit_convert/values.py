"""Converters of a peer's values, which raise ValueError where there is no equivalent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from rlkit_convert.source import LARGEST

T = TypeVar("T")


def unchanged(value: object) -> object:
    """Return a value as it is."""
    return value


def number(value: object) -> float:
    """Return a number, which may be written as text.

    Raises:
        ValueError: The value is not a number.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError("expected a number")
    return value


def number_or_text(value: object) -> object:
    """Return a number, which may be written as text; any other value as it is."""
    try:
        return number(value)
    except ValueError:
        return value


def integer(value: object) -> int:
    """Return an integer.

    Raises:
        ValueError: The value is not an integer.
    """
    converted = number(value)
    if converted != int(converted):
        raise ValueError("expected an integer")
    return int(converted)


def boolean(value: object) -> bool:
    """Return a switch as a boolean.

    Raises:
        ValueError: The value is not a switch.
    """
    word = str(value).lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError("expected true or false")
    return word in ("true", "1", "yes")


def text(value: object) -> str:
    """Return a value as text.

    Raises:
        ValueError: The value is a list or a mapping.
    """
    if isinstance(value, list | Mapping):
        raise ValueError("expected a text")
    return str(value)


def choice(names: Mapping[str, T]) -> Callable[[object], T]:
    """Return a converter from a peer's names to their equivalents."""

    def convert(value: object) -> T:
        if str(value) not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return names[str(value)]

    return convert
