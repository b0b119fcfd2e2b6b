"""Final answers of texts, and whether two are the same."""

from __future__ import annotations

import logging
import re

_NUMBER = re.compile(r"[-+]?\$?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?:/\d+)?%?")
_MARKED = re.compile(r"####[ \t]*(.+)")


def final_answer(text: str) -> tuple[str | None, bool]:
    """Find the final answer of a text, and whether it was marked as such."""
    if marked := _MARKED.findall(text):
        return marked[-1].strip(), True
    if (boxed := _last_boxed(text)) is not None:
        return boxed.strip(), True
    numbers = [m for m in _NUMBER.findall(text) if any(c.isdigit() for c in m)]
    return (numbers[-1] if numbers else text.strip() or None), False


def equal(given: str, expected: str) -> bool:
    """Whether two answers are the same number or the same formula."""
    left, right = _number(given), _number(expected)
    if left is not None and right is not None:
        return abs(left - right) <= 1e-6 * max(1.0, abs(right))
    from math_verify import parse, verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of the missing deadline each time
    # The worker's own deadline replaces math-verify's, which needs signals and hangs in threads.
    parsed = [parse(f"${x}$", parsing_timeout=None) for x in (expected, given)]
    return bool(verify(*parsed, timeout_seconds=None))


def _number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text.strip().rstrip("."))
    if match is None or not any(c.isdigit() for c in match.group()):
        return None
    plain = match.group().replace(",", "").replace("$", "")
    percent, plain = plain.endswith("%"), plain.rstrip("%")
    top, _, bottom = plain.partition("/")
    if bottom and float(bottom) == 0:
        return None
    value = float(top) / float(bottom or 1)
    return value / 100 if percent else value


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for i in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : i]
    return None
