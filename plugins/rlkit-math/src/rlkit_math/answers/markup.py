"""Removal of markup from answers: LaTeX, Markdown, and equivalent characters."""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re

from rlkit_math.answers.units import UNITS_BY_LETTER, table

CURRENCY = "¤"
"""Replaces a dollar sign that is a currency instead of a delimiter of mathematics."""

_SPECIAL_TOKENS = re.compile(r"(?:\s*(?:<[|｜][^<>\s]{1,40}[|｜]>|</[a-z]\w*>|<eos>|<end_of_turn>))+\s*$")
_CALCULATOR = re.compile(r"<<[^<>]*>>")
_NEW_ROW = re.compile(r"\\\\(?:\s*\[[^\[\]]*\])?")
_COLOR = re.compile(r"\\(?:text)?color ?\{[A-Za-z]+\}")
_THIN_GROUPS = re.compile(r"(?<=[0-9])\\,(?=[0-9]{3}(?![0-9]))")
"""Spaces between thousands: `10\\,000`."""
_DELIMITERS = re.compile(r"\\[()\[\]]|\\(?:left|right) ?\.")
_SPACES = re.compile(
    r"\\[,;: ]|\\(?:q?quad|enspace|thinspace|space|hfill)(?![A-Za-z])|\\(?:hspace|[hv]?phantom|tag)\*? ?\{[^{}]*\}"
)
_ROWS = re.compile(
    r"(?P<brace>\\left ?\\\{ ?)?\\begin ?\{(?P<name>array|aligned|align\*?|gathered|split|cases)\}"
    r"(?: ?\{[clr| ]*\})?(?P<content>.*?)\\end ?\{(?P=name)\}(?(brace) ?\\right ?\.)",
    re.DOTALL,
)
"""Rows that are a chain of equal values or a system of equations."""
_ALIGNED = re.compile(r"\s*&\s*(?==)|(?<==)\s*&|^\s*&")
_TEXT = re.compile(
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|normal|bin|rel|ord|punct)|bm|pmb|bold(?:symbol)?|[mh]box|emph|rm|num|boxed|fbox"
    r"|operatorname)(?:\s*\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}|\s+([A-Za-z])(?![A-Za-z]))"
)
_BASIS = re.compile(
    r"\\(?:hat|widehat|vec|overrightarrow|bar) ?(?:\{\s*\\?([ijk])(?:math)?\s*\}|\\?([ijk])(?:math)?(?![A-Za-z]))"
)
"""Unit vectors: `\\hat{\\imath}`."""
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac ?\{ ?(\\(?:text|mathrm) ?\{[^{}]*\}) ?\} ?\{ ?(\\(?:text|mathrm) ?\{[^{}]*\}(?:\^\{?[23]\}?)?) ?\}"
)
_BEFORE_UNITS = re.compile(r"(?:[0-9)\]/*!~]|\\pi|(?<!circ)(?<!circ )\}|[0-9}!~][A-Za-z ]{1,16})$")
"""What may stand before a unit: a number and other units; no degree sign, after which C and F are temperatures."""
_WORD_GOES_ON = re.compile(r"\w")
_REALS = re.compile(r"\\(?:mathbb|Bbb|mathbf) ?(?:\{ ?R ?\}|R)")
_ITEM = r" ?(?:\{ ?([0-9a-z]+) ?\}|([0-9a-z]))"
_COMBINATION = re.compile(
    rf"(?:(?:\{{ ?\}} ?)?_|(?<![\w)\]}}])\^){_ITEM} ?C ?_{_ITEM}|\bC_{_ITEM} ?\^{_ITEM}"
    r"|(?<![\w.])([0-9]+) ?C ?([0-9]+)(?![\w.])"
)
"""Binomial coefficients: `{}_{10}C_3`, `C_{10}^3`, `10C3`."""
_NOT_EQUAL = re.compile(r"\\not ?=")
_UNION = re.compile(r"(?<=[)\]]) ?U ?(?=[(\[])")
_DEGREE = re.compile(r"(?<=[0-9]) ?\^ ?(?:\{ ?o ?\}|o\b)")
_ANGLES = re.compile(r"<([^<>]*,[^<>]*)>")
_OVERLINED = re.compile("(?:[0-9]\u0305)+")
_SPACE = re.compile(r"(?<=[\w{}\])$%]) ?~(?=.)")
"""A tie between words; before a number, it is `about`."""
_SETS = re.compile(r"\\mathbb ?\{? ?([CNQZ]) ?\}?(?: ?(?<=[Z} ])[\^_] ?\{? ?(\+|> ?0|\\geq? ?0) ?\}?)?")
_COMMAND = re.compile(r"\\([A-Za-z]+)\s*")
_EMPHASIS = (
    re.compile(r"(?<![\w)}\]*])\*\*(?=\S)([^*]+?)\*\*(?![\w({\\*])"),
    re.compile(r"(?<![\w)}\]*])\*(?=\S)([^*]+?)\*(?![\w({\\*])"),
    re.compile(r"(?<!\w)__(?=\S)([^_]+?)__(?!\w)"),
    re.compile(r"`([^`]*)`"),
)
_QUOTED = re.compile(r"""(["'])(.*)\1""")
_GROUPS = re.compile(
    r"(?<![\d.,'])(?!(?<=\()[0-9]{1,3},[0-9]{3}\))(?:[0-9]{1,3}(?:(?:,[0-9]{3})+|(?:'[0-9]{3})+)|[0-9]{1,2}(?:,[0-9]{2})+,[0-9]{3})(?![\d']|,\d)"
)
"""Groups of digits: thousands, and lakhs as in 12,34,567; `(1,234)` is a point."""
_EUROPEAN = re.compile(
    r"(?<![\d.,])[1-9][0-9]{0,2}(?:(?:\.[0-9]{3}){2,}(?:,[0-9]+)?|\.[0-9]{3},[0-9]{1,2})(?![\d,]|\.\d)"
)
"""Points between thousands, of which there are two or a comma follows: 1.234.567,8 and 1.234,50."""
_FOREIGN = {
    name: f" {english} "
    for names, english in table("foreign.txt", "=")
    for name in names.split()
    if not name.isascii()  # which `units` reads
}
_AFTER_NUMBER = re.compile(rf"(?:^|(?<=[0-9)}}\]$]) ?)({'|'.join(sorted(_FOREIGN, key=len, reverse=True))})(?!\w)")
_DECIMAL_COMMA = re.compile(r"(?<![0-9}],)(?<=[0-9])\{,\}(?=(?:[0-9]{1,2}|[0-9]{4,})(?![0-9{]))")
_TIMES_POWER = re.compile(r"(?<=[0-9]) ?[xX] ?(?=10 ?\^)")
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉]+")
_SHIFTED = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789-n0123456789")
_MIXED_GLYPH = re.compile("(?<=[0-9])(?=[¼½¾⅓⅔⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞])")
_NOTATION = {name: re.sub(r"(\\[a-z]+)$", r"\1 ", spelling) for name, spelling in table("notation.txt", "=")}
_FULL_WIDTH = {chr(ascii + 0xFEE0): chr(ascii) for ascii in range(0x21, 0x7F)}
_CHARACTERS = str.maketrans({name: text for name, text in _NOTATION.items() if not name.isascii()} | _FULL_WIDTH)


def without_special_tokens(text: str) -> str:
    """Return a completion without the special tokens at its end, such as `<|im_end|>`."""
    return _SPECIAL_TOKENS.sub("", text) if text.rstrip().endswith(">") else text


def without_markup(text: str) -> str:
    """Return an answer without markup, with one spelling of each operator, `¤` for a dollar and `¶` between rows."""
    text = _CALCULATOR.sub("", without_special_tokens(text))
    for emphasis in _EMPHASIS:
        text = emphasis.sub(r" \1 ", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SHIFTED)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SHIFTED)}}}", text)
    text = _OVERLINED.sub(lambda match: f"\\overline{{{match[0].replace(chr(0x305), '')}}}", text)
    text = _AFTER_NUMBER.sub(lambda match: _FOREIGN[match[1]], text)
    text = _SPACE.sub(" ", _MIXED_GLYPH.sub(" ", text)).translate(_CHARACTERS)
    if "\\" in text:
        text = _without_latex(text)
    text = _DEGREE.sub(r"^\\circ", _UNION.sub(r" \\cup ", text))
    text = _COMBINATION.sub(lambda match: "\\binom {{{}}}{{{}}}".format(*filter(None, match.groups())), text)
    text = text.replace("$", " " if text.count("$") % 2 == 0 else CURRENCY)
    text = " ".join(text.replace("**", "^").replace("+/-", "\\pm ").split())
    text = text if text.endswith("..") and not text.endswith(".m..") else text.rstrip(" .,;:\\")
    text = _DECIMAL_COMMA.sub(".", text.lstrip(" :").replace(" ^", "^")).replace("{,}", ",").replace("{:}", ":")
    quoted, angles = _QUOTED.fullmatch(text), _ANGLES.fullmatch(text)
    text = quoted[2].strip(" .") if quoted else f"({angles[1]})" if angles else text
    text = without_european_groups(text)
    text = _GROUPS.sub(lambda match: match[0].replace(",", "").replace("'", ""), text)
    return _TIMES_POWER.sub(" * ", text)


def without_european_groups(text: str) -> str:
    """Return a text with English separators in numbers that can only be European: `1234.50` for `1.234,50`."""
    return _EUROPEAN.sub(lambda match: match[0].replace(".", "").replace(",", "."), text)


def _without_latex(text: str) -> str:
    text = (
        _NEW_ROW.sub("¶", _NOT_EQUAL.sub(r"\\ne ", text))
        .replace("\\$", CURRENCY)
        .replace("\\%", "%")
        .replace("\\! ", "")
        .replace("\\!", "")
    )
    text = _DELIMITERS.sub(" ", _ROWS.sub(_without_rows, _COLOR.sub("", text)))
    text = _UNIT_FRACTION.sub(r"\1/\2", _SPACES.sub(" ", _THIN_GROUPS.sub("", text)).replace("{}^", "^"))
    for _ in range(3):
        text, count = _TEXT.subn(_without_font, text)
        if not count:
            break
    text = _BASIS.sub(lambda match: f" {match[1] or match[2]} ", text)
    text = _SETS.sub(lambda match: f" {'N' if match[2] else match[1]} ", _REALS.sub(r"\\R ", text))
    text = text.replace("\\{", "{").replace("\\}", "}")
    return _COMMAND.sub(lambda match: _NOTATION.get(match[1], f"\\{match[1]} "), text)


def _without_font(match: re.Match[str]) -> str:
    """Return a text without its font; a letter after other text is a unit."""
    before = match.string[: match.start()].rstrip()
    is_unit = _BEFORE_UNITS.search(before) and not _WORD_GOES_ON.match(match.string, match.end())
    content = match[1] or match[2] or ""
    unit = UNITS_BY_LETTER.get(content.strip()) if is_unit else None
    return f" {unit or content} "


def _without_rows(match: re.Match[str]) -> str:
    """Return rows as a list, and rows that begin with `=` as a chain; a matrix, and cases with conditions, stay."""
    rows = [_ALIGNED.sub("", row).strip() for row in match["content"].split("¶")]
    if (match["name"] == "array" and not match["brace"]) or any("&" in row for row in rows):
        return match[0]
    return " , ".join(filter(None, rows)).replace(", =", "=")
