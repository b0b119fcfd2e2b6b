"""Texts that a structure allows, made without a model: what the reward reads in its trial."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from rlkit.interfaces.engine import grammar_of
from rlkit.types import Structure

MAX_BYTES = 4096
"""Bytes of a text, after which a structure is taken to have no short one."""
ENDS = b'}],0"'
"""Bytes that end a value or are a short one, the preferred first, outside of strings."""


def structured_texts(structure: Structure, reference: str) -> tuple[str, str] | None:
    """Return a text with the reference answer wherever it fits, and another one; None if there is no short text.

    A reference that the structure itself allows is the first text.
    """
    is_json = structure.json_schema is not None
    right = _as_it_is(structure, reference) or _text(structure, min, reference, is_json)
    alternatives = [_text(structure, choose, "", is_json) for choose in (min, max)]
    if right is None or alternatives[0] is None:
        return None
    return right, next((text for text in alternatives if text is not None and text != right), alternatives[0])


def _matcher(structure: Structure) -> Any:
    from llguidance import LLMatcher, LLTokenizer

    return LLMatcher(LLTokenizer("byte"), grammar_of(structure))


def _as_it_is(structure: Structure, reference: str) -> str | None:
    """Return the reference as the structure writes it; None if it does not allow it."""
    text = reference
    if structure.json_schema is not None:
        try:
            text = json.dumps(json.loads(reference))
        except ValueError:
            return None
    matcher, data = _matcher(structure), text.encode()
    return text if matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting() else None


def _text(structure: Structure, choose: Callable[[Sequence[int]], int], answer: str, is_json: bool) -> str | None:
    """Return a short text, in which the answer stands wherever it fits; None if there is none."""
    matcher, text, has_answer = _matcher(structure), bytearray(), False
    while len(text) < MAX_BYTES and not matcher.is_error():
        forced = matcher.compute_ff_tokens()
        in_string = is_json and _in_string(text)
        value = list((json.dumps(answer)[1:-1] if in_string else answer).encode())
        if forced:
            addition = forced
        elif value and not has_answer and matcher.validate_tokens(value) == len(value):
            addition, has_answer = value, True
        elif matcher.is_stopped() or matcher.is_accepting():
            return text.decode(errors="replace")
        else:
            addition = [_next_byte(matcher, choose, in_string)]
        has_answer = has_answer and addition is value
        matcher.consume_tokens(addition)
        text += bytes(byte for byte in addition if byte < 256)
    return None


def _next_byte(matcher: Any, choose: Callable[[Sequence[int]], int], in_string: bool) -> int:
    mask = matcher.compute_bitmask()
    allowed = [byte for byte in range(256) if mask[byte // 8] >> (byte % 8) & 1]
    preferred = b'"' if in_string else ENDS
    return next((byte for byte in preferred if byte in allowed), choose(allowed or [0]))


def _in_string(text: bytes | bytearray) -> bool:
    """Whether a beginning of JSON ends inside a string."""
    is_inside = escaped = False
    for byte in text:
        if escaped:
            escaped = False
        elif byte == ord("\\"):
            escaped = True
        elif byte == ord('"'):
            is_inside = not is_inside
    return is_inside
