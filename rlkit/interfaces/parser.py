"""The interface of tool-call parsers: from the policy's text to its calls."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

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
        texts: Arguments as they were written, for forms that write a string and JSON alike: the tool's schema then says
            which of both they are.
    """

    name: str
    arguments: JsonObject = field(default_factory=dict)
    error: str | None = None
    texts: dict[str, str] = field(default_factory=dict, compare=False, repr=False)


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

    generality: ClassVar[int] = 0
    """Of parsers that detect the same template, that with the least is taken."""

    @classmethod
    @abstractmethod
    def detects(cls, template: str) -> bool:
        """Whether a model with this chat template (Jinja source) writes its calls in this form."""

    @abstractmethod
    def parse(self, text: str) -> ParsedTurn:
        """Return the text and the calls; never raises: a malformed call becomes one with an error, or stays text."""


THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""What begins and ends thinking in the families' templates; harmony's channels are the business of its parser."""

MARKS = frozenset(
    {"<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|channel|>", "<|message|>"}
)
"""Special tokens that stay in a turn's text, since they tell its thinking from its answer."""

_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "seed:think")
_HARMONY = (
    r"<\|channel\|>\s*analysis\b",
    r"<\|channel\|>\s*(?!analysis\b)\w+(?:[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>)?",
)
_PAIRS = (
    *((rf"<{tag}(?:\s[^<>]*)?(?<!/)>", rf"</{tag}\s*>") for tag in _TAGS),
    *((re.escape(begin), re.escape(end)) for begin, end in THINKING[1:]),
    _HARMONY,
)
_ANY_THOUGHT = re.compile("|".join(rf"{begin}.*?(?:{end}|\Z)" for begin, end in _PAIRS), re.DOTALL | re.IGNORECASE)
_ANY_END = re.compile("|".join(end for _, end in _PAIRS), re.IGNORECASE)

_ENDS = dict(THINKING)
_BEGIN = re.compile("|".join(re.escape(begin) for begin, _ in THINKING))
_END = re.compile("|".join(re.escape(end) for _, end in THINKING))
_THOUGHT = re.compile("|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in THINKING), re.DOTALL)


def opened_thinking(prompt: str) -> str:
    """Return the opening of thinking with which the prompt ends, so that the turn starts in it; else empty."""
    return next((begin for begin, _ in THINKING if prompt.rstrip().endswith(begin)), "")


def after_thinking(text: str) -> str:
    """Return a turn's text without its thinking, which holds no answer.

    Thinking that never ends reaches to the end of the text. An end without a begin ends thinking from the start.

    >>> after_thinking("<think>4?</think>5")
    '5'
    """
    return _ANY_END.split(_ANY_THOUGHT.sub("\n", text))[-1].lstrip("\n")


def parse_after_thinking(parser: ToolParser, text: str, opened: str = "") -> tuple[str, ParsedTurn]:
    """Return the thinking with which a turn starts, with its end, and what the parser reads after it.

    Calls within thinking, also within later one, do not count and stay text; one that never ends is all thinking. What
    an argument of a call holds is neither its begin nor its end.

    Args:
        parser: Reads the calls.
        text: The policy's turn.
        opened: What the prompt has begun the turn's thinking with, if it has.

    Raises:
        TypeError: The parser returned something else than a ParsedTurn.
    """
    begin = opened or _begin(text)
    if not begin:
        end = _unopened_end(parser, text)
    else:
        closing = text.find(_ENDS[begin], 0 if opened else text.index(begin))
        end = len(text) if closing < 0 else closing + len(_ENDS[begin])
    return text[:end], _parse_outside_thoughts(parser, text[end:])


def _begin(text: str) -> str:
    """Return the opening of thinking at the start of a text; empty if there is none."""
    begin = _BEGIN.match(text.lstrip())
    return begin.group() if begin else ""


def _unopened_end(parser: ToolParser, text: str) -> int:
    """Find the end of thinking that neither the prompt nor the turn opens; 0 if there is none.

    An end in an argument of a call shows by more calls that are read across it than on both sides.
    """
    first, begin = _END.search(text), _BEGIN.search(text)
    if first is None or (begin is not None and begin.start() < first.start()):
        return 0
    last = text.rindex(first.group()) if begin is None else first.start()
    calls = _valid_calls(_parse(parser, text))
    for start in dict.fromkeys((first.start(), last)):
        end = start + len(first.group())
        if calls <= _valid_calls(_parse(parser, text[:start])) + _valid_calls(_parse(parser, text[end:])):
            return end
    return 0


def _parse_outside_thoughts(parser: ToolParser, text: str) -> ParsedTurn:
    """Parse a text whose thoughts are replaced by marks, which no parser takes for a call.

    A thought whose mark is not in the remaining text was an argument's, so it is parsed as it is; unless that only
    finds calls in a thought after a malformed call.
    """
    thoughts = list(_THOUGHT.finditer(text))
    if not thoughts:
        return _parse(parser, text)
    mark = "\ue000"
    while mark in text:
        mark += mark
    marks = re.compile(f"{mark}([0-9]+){mark}")
    turn = _parse(parser, _masked(text, thoughts, range(len(thoughts)), mark))
    outside = {int(number) for number in marks.findall(turn.text)}
    if len(outside) < len(thoughts):
        unmasked = _parse(parser, _masked(text, thoughts, outside, mark))
        valid, valid_unmasked = _valid_calls(turn), _valid_calls(unmasked)
        if valid_unmasked <= valid or len(unmasked.calls) - valid_unmasked < len(turn.calls) - valid:
            turn = unmasked

    def restored(value: Any) -> Any:
        if isinstance(value, str):
            return marks.sub(lambda found: thoughts[int(found[1])].group(), value)
        if isinstance(value, list):
            return [restored(item) for item in value]
        return {restored(key): restored(item) for key, item in value.items()} if isinstance(value, dict) else value

    calls = [replace(c, arguments=restored(c.arguments), error=restored(c.error)) for c in turn.calls]
    return ParsedTurn(restored(turn.text), calls)


def _masked(text: str, thoughts: Sequence[re.Match[str]], masked: Container[int], mark: str) -> str:
    pieces, position = [], 0
    for number, thought in enumerate(thoughts):
        if number in masked:
            pieces += [text[position : thought.start()], f"{mark}{number}{mark}"]
            position = thought.end()
    return "".join([*pieces, text[position:]])


def _parse(parser: ToolParser, text: str) -> ParsedTurn:
    turn = parser.parse(text)
    if not isinstance(turn, ParsedTurn):
        raise TypeError(f"it returned {show(turn)}, expected ParsedTurn")
    return turn


def _valid_calls(turn: ParsedTurn) -> int:
    return sum(call.error is None for call in turn.calls)
