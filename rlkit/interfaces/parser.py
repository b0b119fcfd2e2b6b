"""The interface of tool-call parsers: from the policy's text to its calls."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

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
