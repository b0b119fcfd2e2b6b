"""Words around an answer that do not change it: introductions, names of counted things, what letters stand for."""

from __future__ import annotations

import re

from rlkit_math.answers.markup import without_markup
from rlkit_math.answers.number_words import number_in_words
from rlkit_math.answers.units import are_nouns

_INFINITY = re.compile(r"(?:positive )?\binf(?:inity)?\b(?! \()", re.I)
_BINARY = re.compile(r"(?:0b([01]+)|([01]+) in binary)$")
_REALS_BEYOND = re.compile(
    r"(?:(?:the set of )?(?:all )?real (?:numbers|values)(?: of)?(?: [a-z])?|all values of [a-z]"
    r"|(?:all )?(?<![^ ])[a-z])"
    r" (?:(?:that|which) are |is |must be )?"
    r"(?:(less|smaller)|greater|larger|more) than (or equal to )?(?=-?[0-9.]+(?:/[0-9]+)?$)",
    re.I,
)
"""What is before the end of an interval: `all real numbers less than 3`."""
_GLOSS = re.compile(r"(?<![^ ])([0-9]+) \(([A-Za-z -]+)\)|(?<![^ ])([A-Za-z-]+) \( ?([0-9]+) ?\)")
_NEGATIVE = re.compile(r"(?:negative|minus) (?=[0-9\\.])", re.I)
_HALF = re.compile(r"(?<![^ -])([0-9]+) and a half\b(?! of)")
_LEAD = re.compile(
    r"(?:the )?limit (?=does not exist)|(?:it|the (?:limit|series|sequence|sum|integral)) diverges to (?=[^ ]+$)|"
    r"(?:the|this) function is defined (?:for|on) (?=all |every |any )|"
    r"(?:(?![不错誤误])[\u4e00-\u9fff, ])*(?:答案|选(?= ?[A-H(]))[是为选: ]*|"
    r"(?:(?:so|thus|therefore|hence|then)\b,? )?(?:(?:the|my|our) )?(?:(?:final|correct) )?"
    r"(?:(?:answer|result|solution|total|sum|value|option|choice)(?: of [A-Za-z])?"
    r" ?(?:=|:|is equal to|equals|is|are) ?:? ?|(?:answer|option|choice) "
    r"|(?:(?:ordered )?(?:pair|triple)|point|interval|set|vector|line|curve|circle|plane|equation|function|polynomial"
    r"|matrix|year|number|integer|fraction) (?=[-(\[{\\0-9]|[A-Za-z](?![A-Za-z])))",
    re.I,
)
_MAPPING = re.compile(r"([a-z]) ?: ?(?:[^:]*[:,;] ?)?([a-z]) ?\\mapsto(?![a-z]) ?")
_LABEL = re.compile(r"(?:\\ell|[lLC])(?: ?_ ?\{?\w\}?)? ?: ?(?=[^:]*=)")
_SET = re.compile(r"[A-Z(][A-Z()' ]*(?:(?:\\(?:cup|cap|setminus) ?|-)[A-Z()' ]+)+= ?(?=\{)")
"""What is before the set that `A \\cup B` is."""
_EMPTY = re.compile(r"(?<=(?:empty|.null) set),? ?\(? ?\\emptyset ?\)?")
_ARC = re.compile(r"([0-9.]+) ?\^ ?\{? ?\\circ ?\}? ?([0-9.]+) ?'(?!')(?: ?([0-9.]+) ?(?:''|\"))?")
_ALL = re.compile(
    r"all (?:real )?(?:(?:numbers?|values of) )?(?:[a-z] (?:such that|with|where|for which) )?"
    r"(?=[a-z] ?(?:\\[lgn]e|[<>!]))"
)
_CONSTANT = re.compile(r"(?<=\+) ?(?:an? )?(?:arbitrary )?const(?:ant|\.)?$")
_ROUNDED = (
    r"(?:(?:(?:when|if) )?(?:rounded|rounding|correct|accurate)(?: off| up| down)? )?\bto (?:the )?"
    r"(?:nearest (?!(?:ten|[a-z]+and|[a-z]+red|[a-z]+on|10+)s?\b)[a-z0-9]+"
    r"(?:[- ](?:number|integer|dollar|cent|thousandth|millionth|place|unit)s?\b)?"
    r"|[a-z0-9]{1,5} (?:d\.?p\b|s\.?f\b|sig fig|(?:decimal|significant)(?: place| figure| digit)?)s?\.?)"
    r"(?: of an? [a-z]+)?"
)
ROUNDING = re.compile(rf" ?\({_ROUNDED}\)|,? ?{_ROUNDED},?", re.I)
"""A remark on how a number is rounded."""
_OR_ABOUT = re.compile(
    r"(?:,? (?:or|which is) ?| \((?:or )?)(?:about|approximately|roughly|\\approx) ?"
    r"(-?[0-9.]*[0-9](?: (?!in |as )[A-Za-z]{2,}){0,3})\)?(?: in decimal form| as a decimal)?"
)
"""The decimal beside an exact value: `22/7, or about 3.14`."""
_ORDER = re.compile(r",? \(?(?:in|taken in) (?:any|either|some) order\)?$")
_NAMED = r" ?(?=[a-z](?: ?_ ?\{?[0-9]\}?)? ?= ?[-0-9\\(])"
_OR_NAMED = re.compile(rf" ?(?:\b(?:oder|ou|o|или)\b|或|または){_NAMED}")
_AND_NAMED = re.compile(rf" ?(?:\b(?:und|et|y|e|и)\b|和){_NAMED}|(?<=[0-9)]) & (?=[-0-9(])")
"""What joins two equations in other languages: `x = 2 oder x = 3`."""
THUS = re.compile(r"(?:so|thus|therefore|hence)\b,? ", re.I)
_COUNTED_NOUN = re.compile(r"(?=[A-Za-z ]*[a-z])((?:[A-Za-z]{2,} ){0,4}[A-Za-z]{2,}) ?[:=] ?")


def without_phrases(text: str) -> str:
    """Return an answer without introductions such as `the answer is`, and with notations for some words."""
    lead = _LEAD.match(text)
    text = text if lead is None else text[lead.end() :]
    text = ROUNDING.sub("", text).strip() if "to" in text else text
    text = _ORDER.sub("", text) if "order" in text else text
    about = _OR_ABOUT.search(text)
    text = text if about is None or about.end() < len(text) else f"{text[: about.start()]} \\approx {about[1]}"
    counted = _COUNTED_NOUN.match(text)
    if counted is not None and are_nouns(counted[1].split()):
        text = text[counted.end() :]
    text = _MAPPING.sub(r"\1(\2) = ", _LABEL.sub("", text, count=1), count=1) if ":" in text else text
    text = text.replace("D.N.E", "DNE")
    if "\\begin" not in text:
        text = _AND_NAMED.sub(" and ", _OR_NAMED.sub(" or ", text))
    text = _SET.sub("", text, count=1) if "{" in text else text
    text = _EMPTY.sub("", text) if "emptyset" in text else text
    text = _ARC.sub(_in_words, text) if "'" in text else text
    text = _CONSTANT.sub(" C", _ALL.sub("", text, count=1))
    text = _BINARY.sub(r"\1\2_2", _INFINITY.sub(r"\\infty", text))
    text = _REALS_BEYOND.sub(lambda match: f"x {'<' if match[1] else '>'}{'=' if match[2] else ''} ", text)
    thus = THUS.match(text)
    text = _GLOSS.sub(_without_gloss, text if thus is None else text[thus.end() :])
    return without_markup(_NEGATIVE.sub("-", _HALF.sub(r"\1 1/2", text)))


def _in_words(match: re.Match[str]) -> str:
    """Return an angle in degrees, minutes and seconds with the names of its units."""
    return f"{match[1]} degree {match[2]} arcminute" + (f" {match[3]} arcsecond" if match[3] else "")


def _without_gloss(match: re.Match[str]) -> str:
    """Return the number of `84 (eighty-four)` without its words, if they are the same."""
    digits, words = match[1] or match[4], match[2] or match[3]
    return digits if number_in_words(words) == int(digits) else match[0]
