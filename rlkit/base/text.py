"""Texts that rlkit did not write, made fit to be kept and shown: without credentials, without control codes."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence

from rlkit.base.credentials import is_credential, substitute

HIDDEN = "***"

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1: escape sequences, carriage returns, bells
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # what turns the direction of text, and separators
    "\ud800-\udfff\U000e0000-\U000e007f]"  # lone surrogates, and invisible tags
)


def tokens_until(tokens: Sequence[int], stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> int | None:
    """Return the smallest number of tokens whose text has one of some texts; None if all of them have none."""

    def stopped(count: int) -> bool:
        text = decode(tokens[:count])
        return any(stop in text for stop in stops)

    if not stopped(len(tokens)):
        return None
    return bisect_left(range(len(tokens)), True, key=stopped)


def counted(count: int, noun: str) -> str:
    """Return a number with its noun, such as `1 step` or `2 steps`."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def visible(text: str) -> str:
    """Return a text whose control codes are written out, as `\\x1b`; line breaks and tabs stay."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text.replace("\r\n", "\n"))


def redact(text: str) -> str:
    """Return a text without credentials; references to the environment stay."""
    return substitute(text, lambda *_: HIDDEN)


def safe(text: str) -> str:
    """Return a text that may be shown on a terminal."""
    return visible(redact(text))


def redact_option(key: str, value: str) -> str:
    """Return the value of an option of a command line without its credentials."""
    return HIDDEN if is_credential(key, value) else redact(value)


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its credentials, those in an argument of their own included."""
    return [_redacted(before, argument) for before, argument in zip(["", *arguments], arguments, strict=False)]


def _redacted(before: str, argument: str) -> str:
    """Return an argument of a command line without credentials, by its own option or the one before."""
    key, equals, value = argument.partition("=")
    if argument.startswith("--"):
        return f"{key}={redact_option(key.removeprefix('--'), value)}" if equals else redact(argument)
    is_value = before.startswith("--") and "=" not in before
    return redact_option(before.removeprefix("--") if is_value else "", argument)


def part_name(part: object) -> str:
    """Return a part's class for messages; of a plugin's, with the plugin and the distribution that it comes from."""
    cls = type(part)
    return cls.__name__ + _source(cls.__module__.partition(".")[0])


@functools.cache
def _source(package: str) -> str:
    """Return where a top-level package comes from; looking that up takes longer than many a part's call."""
    from rlkit.base.installed import PARTS, entry_points

    if package == "rlkit":
        return ""
    for entry in entry_points(PARTS):
        if entry.value.partition(":")[0].partition(".")[0] == package and entry.dist is not None:
            return f" of plugin {entry.name!r} ({entry.dist.name} {entry.dist.version})"
    return f" of {package}"
