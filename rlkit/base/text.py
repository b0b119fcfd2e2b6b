"""Texts that rlkit did not write, made fit to be kept and shown: without credentials, without control codes."""

from __future__ import annotations

import functools
import re
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence

HIDDEN = "***"

CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 and C1: escape sequences, carriage returns, bells
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff"  # what turns the direction of text, and separators
    "\ud800-\udfff\U000e0000-\U000e007f]"  # lone surrogates, and invisible tags
)

USERINFO = re.compile(r"(?<=://)[^/\s'\"]+(?=@)")
SECRET_NAME = re.compile(r"(^|[_.-])(token|password|passwd|api[_-]?key|secret|authorization)$", re.IGNORECASE)
"""Names of options and of fields whose value is a credential; `max_tokens` is none."""

_WORD = r"(?:[\w.-]*[_.-])?(?:token|password|passwd|api[_-]?key|secret)"
SECRETS = (
    re.compile(rf"(?<![\w.-])({_WORD}=)[^\s&#;,'\"]+", re.IGNORECASE),  # options and queries
    re.compile(rf"""(["']{_WORD}["']\s*:\s*["'])[^"']+""", re.IGNORECASE),  # JSON, and Python's own form
    re.compile(r"(authorization[\"']?\s*[:=]\s*[\"']?)[^\s\"',]+(?:\s+[^\s\"',]+)?", re.IGNORECASE),
    re.compile(r"(\bbearer\s+)[\w.~+/=-]{8,}", re.IGNORECASE),
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
    """Return a text without the credentials in URLs, headers, queries and options."""
    text = USERINFO.sub(HIDDEN, text)
    for pattern in SECRETS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text


def safe(text: str) -> str:
    """Return a text that may be shown on a terminal."""
    return visible(redact(text))


def redact_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line without its credentials, those in an argument of their own included."""
    before = ["", *arguments]
    return [
        HIDDEN if SECRET_NAME.search(option.lstrip("-")) and option.startswith("--") else redact(argument)
        for option, argument in zip(before, arguments, strict=False)
    ]


def redact_tree(value: object) -> object:
    """Return nested mappings and lists whose texts have no credentials."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {
            k: HIDDEN if isinstance(v, str) and SECRET_NAME.search(str(k)) else redact_tree(v) for k, v in value.items()
        }
    return [redact_tree(v) for v in value] if isinstance(value, list | tuple) else value


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
