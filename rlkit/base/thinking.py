"""The thinking in a turn of the policy: what begins and ends it, and what the turn answers after it."""

from __future__ import annotations

import re

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"))
"""What begins and ends thinking in the families' templates; harmony's channels are the business of its parser."""

MARKS = frozenset(
    {"<think>", "</think>", "[THINK]", "[/THINK]", "<|channel>", "<channel|>", "<|channel|>", "<|message|>"}
)
"""Special tokens that stay in a turn's text, since they tell its thinking from its answer."""

_TAGS = ("think", "thinking", "thought", "thoughts", "reasoning", "seed:think")
_PAIRS = (
    *(("<", rf"{tag}(?:\s[^<>]*)?(?<!/)>", rf"/{tag}\s*>") for tag in _TAGS),
    (r"\[", r"THINK\]", r"/THINK\]"),
    ("<", r"\|channel>thought", r"channel\|>"),
    (
        "<",
        r"\|channel\|>\s*analysis\b",
        r"\|channel\|>\s*(?!analysis\b)\w+(?:[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>)?",
    ),
)
"""The first character of both, and what follows it where thinking begins and ends."""
_BEGINS = [f"{first}(?P<begin{number}>{begin})" for number, (first, begin, _) in enumerate(_PAIRS)]
_MARK = re.compile("|".join([*_BEGINS, *(first + end for first, _, end in _PAIRS)]), re.I)
_ENDS = {f"begin{number}": re.compile(first + end, re.I) for number, (first, _, end) in enumerate(_PAIRS)}


def opened_thinking(prompt: str) -> str:
    """Return what begins the thinking in which the policy's turn starts, as the prompt ends with it; else nothing."""
    return next((begin for begin, _ in THINKING if prompt.rstrip().endswith(begin)), "")


def after_thinking(text: str) -> str:
    """Return a turn's text without its thinking, which holds no answer.

    Thinking that never ends reaches to the end of the text. An end without a begin ends thinking from the start.

    >>> after_thinking("<think>4?</think>5")
    '5'
    """
    answers: list[str] = []
    position = 0
    mark = _MARK.search(text)
    while mark is not None:
        answers.append(text[position : mark.start()])
        end: re.Match[str] | None = mark
        if mark.lastgroup is None:
            answers.clear()
        else:
            end = _ENDS[mark.lastgroup].search(text, mark.end())
        if end is None:
            position = len(text)
            break
        position = end.end()
        mark = _MARK.search(text, position)
    return "\n".join(filter(None, [*answers, text[position:]]))
