"""Long replies of tools, users and environments: their middle is left out, and the policy reads how much that was."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rlkit.recipe import ConversationLimits
from rlkit.types import Message

WIDEST = 8
"""Characters of a token, on average, beyond which a reply is cut by its characters: 10 MB are not tokenised."""

MOST = 2048
"""Tokens of a reply in a long context: about 8 KB of prose or code."""

TRIES = 4
"""Texts that are measured at each end of a reply, to find one that nearly has the tokens that it may."""

Count = Callable[[str], int]
"""Returns the number of tokens of a text."""


def reply_limit(section: ConversationLimits, context: int) -> int | None:
    """Return the tokens of a reply: by default one leaves room to go on, and is no burden in every turn after it."""
    return max(1, min(context // 4, MOST)) if section.max_reply_tokens == "auto" else section.max_reply_tokens


def without_middle(message: Message, limit: int, count: Count) -> Message | None:
    """Return a message of about `limit` tokens with a note in the middle of how much is left out; None if it fits.

    The beginning and the end have at most half of `limit` tokens each, and are whole characters of the text. Texts of
    typed parts are cut as one; other parts stay.

    Args:
        message: Its content is a text or a list of typed parts.
        limit: Tokens, those of the note not counted.
        count: Of the policy's tokenizer.
    """
    content = message.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [text for text in map(_text, parts) if text is not None]
    middle = _middle("".join(texts), limit, count)
    if middle is None:
        return None
    remaining_texts = iter(list(_outside(texts, *middle)))
    new_parts = [part if _text(part) is None else _with_text(part, next(remaining_texts)) for part in parts]
    return {**message, "content": new_parts if isinstance(content, list) else new_parts[0]}


def note(characters: int) -> str:
    """Return the marker for removed text."""
    return f"\n[... {characters:,} characters left out ...]\n"


def longest_piece(piece: Callable[[int], str], high: int, tokens: int, count: Count) -> int:
    """Return the number of characters of a text, at most `high`, that fill its token budget without exceeding it."""
    low = low_tokens = 0
    high_tokens = count(piece(high))
    if high_tokens <= tokens:
        return high
    for _ in range(TRIES):
        guess = low + max(1, (high - low) * (tokens - low_tokens) // (high_tokens - low_tokens))
        if guess >= high:
            break
        tokens_of_guess = count(piece(guess))
        if tokens_of_guess <= tokens:
            low, low_tokens = guess, tokens_of_guess
        else:
            high, high_tokens = guess, tokens_of_guess
    return low


def _text(part: object) -> str | None:
    """Return the text of a content, or of one of its parts; None for an image and other things."""
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _with_text(part: object, text: str) -> object:
    return {**part, "text": text} if isinstance(part, Mapping) else text


def _middle(text: str, limit: int, count: Count) -> tuple[int, int] | None:
    """Return the start and end of the middle to remove; None if the text fits."""
    if len(text) <= WIDEST * limit and count(text) <= limit:
        return None
    first = limit - limit // 2
    start = longest_piece(lambda length: text[:length], min(WIDEST * first, len(text)), first, count)
    last = limit // 2
    length = min(WIDEST * last, len(text) - start)
    end = len(text) - longest_piece(lambda length: text[len(text) - length :], length, last, count)
    return (start, end) if start < end else None


def _outside(texts: Sequence[str], start: int, end: int) -> Iterator[str]:
    """Yield what is left of texts, of which the characters from `start` to `end`, counted over all, are replaced."""
    offset = 0
    for text in texts:
        first, last = max(0, start - offset), max(0, end - offset)
        replacement = note(end - start) if offset <= start < offset + len(text) else ""
        yield text[:first] + replacement + text[last:]
        offset += len(text)
