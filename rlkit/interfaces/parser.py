"""The interface of tool-call parsers: from the policy's text to its calls."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from rlkit.base.errors import show
from rlkit.interfaces.runtime import RunPart
from rlkit.types import JsonObject


@dataclass
class ToolCall:
    """A call that the policy wrote.

    Args:
        name: The tool's name.
        arguments: Arguments by name; checked against the tool's schema afterwards.
        error: Why the call is malformed; `arguments` are then empty.
    """

    name: str
    arguments: JsonObject = field(default_factory=dict)
    error: str | None = None


@dataclass
class ParsedTurn:
    """A turn of the policy.

    Args:
        text: The text without the calls.
        calls: The calls, in order.
    """

    text: str
    calls: list[ToolCall] = field(default_factory=list)


class ToolParser(RunPart):
    """Reads the calls in a turn's text, which has its special tokens, but not the token that ended the turn."""

    @classmethod
    @abstractmethod
    def detects(cls, template: str) -> bool:
        """Whether a model with this chat template (Jinja source) writes its calls in this form."""

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """Return the text and the calls; never raises: a malformed call becomes one with an error, or stays text."""


END_OF_THINKING = "</think>"


def parse_after_thinking(parser: ToolParser, text: str) -> tuple[str, ParsedTurn]:
    """Return the thinking of a turn, with its end, and what the parser reads after it.

    Calls within the thinking do not count. An argument of a call may hold `</think>`: then more calls are read across
    it than on both sides, and the thinking ends at the first one, or there is none.

    Raises:
        TypeError: The parser returned something else than a ParsedTurn.
    """
    unsplit = _parse(parser, text)
    last, first = text.rfind(END_OF_THINKING), text.find(END_OF_THINKING)
    for end in dict.fromkeys((last, first)) if first >= 0 else ():
        start = end + len(END_OF_THINKING)
        turn = _parse(parser, text[start:])
        if _valid_calls(unsplit) <= _valid_calls(_parse(parser, text[:end])) + _valid_calls(turn):
            return text[:start], turn
    return "", unsplit


def _parse(parser: ToolParser, text: str) -> ParsedTurn:
    turn = parser.parse(text)
    if not isinstance(turn, ParsedTurn):
        raise TypeError(f"it returned {show(turn)}, expected ParsedTurn")
    return turn


def _valid_calls(turn: ParsedTurn) -> int:
    return sum(call.error is None for call in turn.calls)
