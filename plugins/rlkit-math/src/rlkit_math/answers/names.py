"""Names that an equation gives a value: `x`, `f'(2)`, `\\angle ABC`, `|z|`, `\\frac{dy}{dx}`, `\\gcd(a, b)`, `a:b`."""

from __future__ import annotations

import re

from rlkit_math.answers.expression import GREEK

_LETTER = rf"(?:(?!e ?\^)[A-Za-z]|\\(?:{'|'.join(GREEK)}|ell)(?![A-Za-z]))"
_ACCENTED = r"\\(?:vec|hat|bar|overline|tilde|widehat|overrightarrow|mathbf|mathcal|mathbb) ?\{? ?[A-Za-z]{1,3} ?\}?"
_INDEX = r"(?: ?_ ?(?:\w|\{[^{}]*\}))? ?'*(?: ?\^ ?\{ ?(?:-1|\( ?\w+ ?\)) ?\}| ?\^ ?[T*])?"
_SYMBOL = rf"(?:{_LETTER}|{_ACCENTED}){_INDEX}"
_ARGUMENTS = r"(?: ?\([^()]*\)| ?\[[^\[\]]*\])"
_FIGURE = r"(?:m ?)?\\(?:angle|triangle) ?[A-Z]{1,4}|[A-Z]{2,4}|\[[A-Z]{3,4}\]"
_OPERATOR = (
    r"\\?(?:sin|cos|tan|det|gcd|lcm|deg|dim|rank|arg|Re|Im|Pr|max|min|Var|tr)(?![A-Za-z])"
    rf" ?(?:{_ARGUMENTS}|{_SYMBOL}| ?\{{[^{{}}]*\}})?"
)
_SIMPLE = rf"{_FIGURE}|{_SYMBOL}{_ARGUMENTS}?|{_OPERATOR}"
NAME = re.compile(
    rf"{_SIMPLE}|\|(?:{_FIGURE}|z|{_ACCENTED}|[A-Z][^|=]*)\||\( ?{_SYMBOL}(?: ?, ?{_SYMBOL})+ ?\)"
    rf"|\\(?:sum|prod|int|lim)(?![a-z]).*|d ?{_LETTER} ?/ ?d ?{_LETTER}"
    rf"|\\frac ?\{{ ?(?:d ?{_LETTER}|{_SIMPLE}) ?\}} ?\{{ ?(?:d ?{_LETTER}|{_SIMPLE}) ?\}}"
    rf"|(?:{_SIMPLE})(?: ?: ?(?:{_SIMPLE}))+"
)
_MARKS = re.compile(
    r"[ {}]|\\(?:vec|hat|bar|widehat|overrightarrow|mathbf)(?![a-z])|^m(?= ?\\angle)|_\{? ?1 ?, ?2 ?\}?$"
)


def plain_name(name: str) -> str:
    """Return a name without accents, braces and blanks: `v` for `\\vec{v}`."""
    return _MARKS.sub("", name)
