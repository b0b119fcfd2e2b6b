"""Words around an answer that do not change it: introductions, names of counted things, what letters stand for."""

from __future__ import annotations

import re

from rlkit_math.answers.markup import without_markup
from rlkit_math.answers.number_words import number_in_words
from rlkit_math.answers.units import are_nouns

_INFINITY = re.compile(r"(?:positive )?\binfinity\b", re.I)
_GLOSS = re.compile(r"(?<![^ ])([0-9]+) \(([A-Za-z -]+)\)")
_NEGATIVE = re.compile(r"(?:negative|minus) (?=[0-9\\.])", re.I)
_HALF = re.compile(r"(?<![^ -])([0-9]+) and a half\b(?! of)")
_LEAD = re.compile(
    r"(?:(?!不)[\u4e00-\u9fff, ])*(?:答案|选(?= ?[A-H(]))[是为选: ]*|"
    r"(?:(?:so|thus|therefore|hence|then)\b,? )?(?:(?:the|my|our) )?(?:(?:final|correct) )?"
    r"(?:(?:answer|result|solution|total|sum|value|option|choice)(?: of [A-Za-z])?"
    r" ?(?:=|:|is equal to|equals|is|are) ?:? ?|(?:answer|option|choice) "
    r"|(?:point|pair|triple|interval|set|vector) (?=[(\[{]))",
    re.I,
)
_THUS = re.compile(r"(?:so|thus|therefore|hence)\b,? ", re.I)
_FOR_ALL = re.compile(
    r",? \(?(?:for (?:all|any|every|each)|\\forall)(?: real)?(?: numbers?)?"
    r"(?: ?[a-z])?(?: ?\\in ?\(-\\infty ,\\infty \))?\)?$"
    r"|(?<=[\w)}]),? ?\(?(?:for |where |with )?(?:(?:some|any|every|arbitrary|an?|real) )*constants? [A-Za-z]\)?$"
    r"|(?<=[\w)}]),? ?\(?(?:where )?[A-Za-z] ?(?:\\in ?\(-\\infty ,\\infty \)|is an? (?:[a-z]+ )?constant)\)?$"
)
"""What is true of every formula, `for all real x`, or says what a letter is: `for some constant c`."""
_INTEGER = re.compile(
    r",? ?\(?(?:where |with |for |and )*(?:(?:any|all|every|some|arbitrary) )?"
    r"(?:([a-z]) (?:is |being )?(?:an? |any )?(positive |non-?negative )?integers?"
    r"|(positive |non-?negative )?integers? ([a-z]))\)?$"
)
_MEMBER = re.compile(r",? ?\(([a-z] ?\\in ?[^()]+)\)$")
_COUNTED_NOUN = re.compile(r"(?=[A-Za-z ]*[a-z])((?:[A-Za-z]{2,} ){0,4}[A-Za-z]{2,}) ?[:=] ?")


def without_phrases(text: str) -> str:
    """Return an answer without introductions such as `the answer is`, and with notations for some words."""
    lead = _LEAD.match(text)
    text = text if lead is None else text[lead.end() :]
    counted = _COUNTED_NOUN.match(text)
    if counted is not None and are_nouns(counted[1].split()):
        text = text[counted.end() :]
    text = _INTEGER.sub(_membership, _MEMBER.sub(r", \1", _FOR_ALL.sub("", text)))
    text = _INFINITY.sub(r"\\infty", text)
    thus = _THUS.match(text)
    text = _GLOSS.sub(_without_gloss, text if thus is None else text[thus.end() :])
    return without_markup(_NEGATIVE.sub("-", _HALF.sub(r"\1 1/2", text)))


def _membership(match: re.Match[str]) -> str:
    return f", {match[1] or match[4]} \\in {'N' if match[2] or match[3] else 'Z'}"


def _without_gloss(match: re.Match[str]) -> str:
    """Return the number of `84 (eighty-four)` without its words, if they are the same."""
    return match[1] if number_in_words(match[2]) == int(match[1]) else match[0]
