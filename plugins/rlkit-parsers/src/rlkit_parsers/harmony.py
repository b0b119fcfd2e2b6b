"""The parser of gpt-oss, whose form is called harmony."""

from __future__ import annotations

import re

from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.parsers.text import find_edge, read_json
from rlkit_parsers.calls import named_call

_HEADER = re.compile(
    # the prompt ends with the role, so that a turn starts with what follows it in a header
    r"(?:\A\s*(?:to=[^\s<]+\s*)?|<\|start\|>[^<]*|(?=<\|channel\|>))"
    r"(?:<\|(?:channel|constrain)\|>[^<]*){0,2}<\|message\|>"
)
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_EDGE = re.compile(r"<\|(?:call|end|return)\|>|(?=<\|start\|>)")
_USER = ("user", "assistant", "all")


class HarmonyParser(ToolParser):
    """Reads `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>`, as gpt-oss writes it.

    A turn is one or more messages. One with a recipient, which may also stand in the role, is a call; what is on the
    channel `analysis` is reasoning, never a call, and no part of the text; the text is that of all others.
    """

    @classmethod
    def detects(cls, template: str) -> bool:
        return "<|channel|>" in template and "<|message|>" in template and "functions." in template

    def parse(self, text: str) -> ParsedTurn:
        calls: list[ToolCall] = []
        texts: list[str] = []
        position = 0
        header = _HEADER.search(text)
        while header is not None:
            texts.append(text[position : header.start()])
            channel, recipient = _CHANNEL.search(header.group()), _RECIPIENT.search(header.group())
            thought = channel is not None and channel[1] == "analysis"
            if recipient is not None and recipient[1] not in _USER and not thought:
                value, position = read_json(text, header.end(), _EDGE)
                calls.append(named_call(recipient[1], value))
            else:
                stop, position = find_edge(text, header.end(), _EDGE)
                texts += [] if thought else [text[header.end() : stop]]
            header = _HEADER.search(text, position)
        return ParsedTurn("\n\n".join(filter(None, map(str.strip, [*texts, text[position:]]))), calls)
