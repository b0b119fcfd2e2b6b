"""What the last sentence of a text says in words, and what its last lines assign to several names.

Only a reference in words, or of several names, asks for these: `Maria` is the answer of `Maria is the fastest.`
"""

# ruff: noqa: RUF001 (answers contain these characters)

from __future__ import annotations

import re
from collections.abc import Callable

from rlkit_math.answers.prose import is_doubtful
from rlkit_math.answers.units import alternatives
from rlkit_math.answers.values import Answer, BracketedItems, Formula, Named, Number, UnorderedItems, Words
from rlkit_math.answers.words import CJK

MAX_SENTENCE = 300
"""Maximum number of characters of a sentence with an answer in words."""
MAX_LINES = 6
"""Maximum number of lines that assign values."""

_END_OF_SENTENCE = re.compile(r"[.!?]\s+(?=\S)")
_MARKS = re.compile(r"[*_`$\"“”]|\\(?:text|textbf|boxed) ?\{|\}")
_OPENING = r"(?:(?:so|thus|therefore|hence|finally|consequently|in conclusion)\b,? )?"
_DOUBT = re.compile(
    r"\b(?:no|not|never|neither|nor|cannot|or|if|unless|might|may|could|should|perhaps|maybe|probably|possibly"
    r"|likely|guess|suppose|assum\w+|either|almost|nearly|except|but|rather|instead|opposite|wrong|incorrect|false"
    r"|some|say|says|said|thinks?|thought|hope|seems?|appears?|claims|however|although|though|while|whereas|than"
    r"|yesterday|initially|originally|starts?|started|begins?|began)\b"
    r"|n't\b|[?≠]",
    re.I,
)
_STATING = re.compile(
    r"(?:^|[\s,])(?:is|are|was|were|be|has|have|(?:it|that|he|she|answer)['’]s|(?:illustrat|represent|demonstrat|mean)e?s|becomes?"
    r"|(?:falls?|fell|land(?:s|ed|ing)?|occurs?) on"
    r"|(?:lives?|located|arrives?|goes|travels?) (?:in|at|to)|(?:answer|result|day|name) ?:"
    r"|(?:formulated|written|discovered|invented|painted|composed|founded|developed|built|designed|proved) by)"
    r"(?: (?:always|therefore|thus|also|then|indeed|exactly|an?|the|on))*"
    r"(?: (?:Sir|Dr\.?|Professor|King|Queen|President))? ?$",
    re.I,
)
"""What is before words that end a sentence as its predicate."""
_FOREIGN = re.compile(r"(?:^|\s)(?:ist|est|es|é|è|lautet|heißt)(?: (?:die|der|das|la|le|el|il))? $", re.I)
"""What is before such words in other languages, which have words of doubt of their own."""
_FOREIGN_DOUBT = re.compile(
    rf"\b(?:wenn|falls|si|se|glaube|denke|crois|pense|creo|pienso|credo|acho|falso|faux|früher|avant|antes)\b"
    rf"|(?<!\w){alternatives('either')}(?!\w)",
    re.I,
)
_CJK_DOUBT = re.compile("[不没沒非未吗嗎或误誤错錯?？]|如果|可能|也许|认为|以为|曾|ない|か$|아니")
_SUPERLATIVE = re.compile(
    r" (?:(?:is|was) [a-z]+er|did(?: it| so)?|(?:finished|came|arrived|was) first"
    r"|(?:is|was|must be|has to be) the (?!second|third|next|last|same|opposite)[a-z]+"
    r"|(?:(?!and |with )[a-z]+ ){1,4}the (?!second|third|next)"
    r"(?:most\b|least\b|[a-z]+est\b|winner\b|only\b|correct\b|one who\b)|(?:wins?|won)\b)[^,;:]*"
)
"""What is after a name that is the subject of a sentence."""
_VERDICT = re.compile(
    rf"[^\w\n]{{0,8}}{_OPENING}(yes|no|true|false)(?:[,.;:!]| ?[—–-] |(?= (?:because|since)\b)|$)", re.I
)
_REASON = re.compile(r"(?<=\w),? \(?(?:because|since|as) [^?]+$")
_CLASS = re.compile(r" (?:triangle|function|number|series|sequence|day|quadrilateral|solutions?)(?: exist)?")
_DETAIL = re.compile(
    r" (?:with|who) (?!(?:an? |the )?(?:exception|caveat))[^%]*$| \([a-z][^()%]{2,80}\)"
    r"|, (?:on|in|at|near|from|located|situated|an?|the) (?![^%]* (?:is|are|was|were|has|have|and then) )[^,;:%]*$"
)
_THUS = re.compile(r", (?:so|thus|hence|therefore) ")
_ON_DAY = re.compile(r"\bon(?: an?)? $")
_DOES = re.compile(rf"{_OPENING}(?:it|(?:the|its) (?:[a-z]+ ){{0,3}}[a-z]+) $", re.I)
_LETTER_NAMED = re.compile(
    rf"{_OPENING}(?:.{{0,80}}\b(?:option|choice|answer|statement|is|select|choose|pick|вариант|réponse|opción|opção):? "
    r"|only |among [^,]{1,40}, )?\(?([A-J])(?:\)|(?![\w'’]))"
    r"(?: is (?:the )?(?:only )?(?:correct|right|true|best(?= [aco]))(?: (?:answer|choice|option|one|statement))?"
    r"|(?:[,:;] | - ).*)?",
    re.I,
)
"""A sentence that names the letter of a choice."""
_LETTER = r"\(?([A-H])\)?"
_CHOICES = re.compile(
    rf"{_OPENING}(?:the )?(?:correct )?(?:(?:options?|answers?|choices?|statements?)(?: are)? |both )?{_LETTER}"
    rf"(?:(?:, (?:and )?| and | & ){_LETTER}){{1,5}}"
    r"(?: are (?:all |both )?(?:the )?(?:correct|right|true)(?: [a-z]+)?)?",
    re.I,
)
_OPPOSITES = (("yes", "no"), ("true", "false"), ("even", "odd"), ("increasing", "decreasing"), ("prime", "composite"))
_RETRACTING = re.compile(
    r"\b(?:but|however|wait|actually|wrong|incorrect|mistake|maybe|perhaps|probably|possibly|instead|oops)\b|\?", re.I
)
_ASSIGNMENT = re.compile(r"(?:[-*•] |[0-9]{1,2}[.)] )?(\S.*)")


def says(text: str, words: str) -> bool:
    """Whether the last sentence of a text says words: as what something is, as who is most of all, or as yes or no."""
    line = _last_line(text)
    sentence = _last_sentence(line)
    opposites = {other for pair in _OPPOSITES if words.lower() in pair for other in pair} - {words.lower()}
    if len(line) > MAX_SENTENCE or any(re.search(rf"\b{other}\b", line, re.I) for other in opposites):
        return False
    verdict = _VERDICT.match(line)
    if verdict is not None:
        return verdict[1].lower() == words.lower() and not _RETRACTING.search(line)
    sentence = _THUS.split(_REASON.sub("", sentence))[-1]
    if re.fullmatch(f"[{CJK}]+", words):
        before, _, after = sentence.rstrip("。").rpartition(words)
        is_said = before.rstrip()[-1:] in "是为為はが은는이가：:" and not _CJK_DOUBT.search(before)
        return is_said and after in ("", "です", "である", "だ", "입니다", "이다")
    match = re.search(rf"(?<![\w'-]){re.escape(words)}(?![\w'-])", sentence, re.I)
    if match is None or _DOUBT.search(sentence[: match.start()] + "," + sentence[match.end() :]):
        return False
    before, after = sentence[: match.start()], sentence[match.end() :]
    if not after or _CLASS.fullmatch(after) or _DETAIL.match(after):
        is_alone = not before and _END_OF_SENTENCE.search(line) is None
        is_day = words.lower().endswith("day") and _ON_DAY.search(before) is not None
        is_verb = (words[-1] == "s" or words.lower().startswith("cannot ")) and _DOES.fullmatch(before) is not None
        if _FOREIGN.search(before) is not None:
            return not is_doubtful(before) and _FOREIGN_DOUBT.search(before) is None
        return _STATING.search(before) is not None or is_alone or is_day or is_verb
    is_subject = words[0].isupper() and re.fullmatch(rf"{_OPENING}(?:[^,]{{1,80}}, )?", before, re.I) is not None
    return is_subject and _SUPERLATIVE.fullmatch(after) is not None


def names_letter(text: str, letter: str) -> bool:
    """Whether the last sentence of a text names the letter of a choice, and no other."""
    line = _last_line(text)
    sentence = _last_sentence(line) if len(line) <= MAX_SENTENCE else ""
    named = _LETTER_NAMED.fullmatch(sentence)
    if named is None or named[1] != letter or _DOUBT.search(sentence[: named.end(1)]):
        return False
    return set(re.findall(r"\b[B-J]\b|(?:\(|option )A\b", sentence)) <= {letter, f"({letter}", f"option {letter}"}


def chosen_letters(text: str) -> str | None:
    """Return the letters of several choices that the last line names, as a list; None if it says something else."""
    line = _last_line(text).strip(" .")
    named = _CHOICES.fullmatch(line) if len(line) <= MAX_SENTENCE else None
    return None if named is None else ", ".join(re.findall(r"\b[A-H]\b", line))


def assigned_in_lines(text: str, parse: Callable[[str], Answer | None]) -> str | None:
    """Return the values that the last lines assign to different names or to one, as a list; None for a single one."""
    names: list[str] = []
    values: list[str] = []
    for line in reversed(text.strip().split("\n")[-2 * MAX_LINES :]):
        match = _ASSIGNMENT.fullmatch(_MARKS.sub("", line).strip())
        answer = None if match is None or "=" not in line else parse(match[1])
        if match is not None and not (isinstance(answer, Named) and isinstance(answer.value, Number | Formula)):
            break
        if match is not None and isinstance(answer, Named):
            names.append(answer.name)
            values.append(match[1].rstrip(" .,;"))
    is_list = 1 < len(values) <= MAX_LINES and len(set(names)) in (1, len(names))
    return ", ".join(reversed(values)) if is_list else None


def asked_by(expected: Answer | None, text: str, parse: Callable[[str], Answer | None]) -> str | None:
    """Return a text's answer in the form of a reference of words or of several values; None if it has none."""
    match expected:
        case Words(words) if len(words) > 1:
            return words if says(text, words) else None
        case Words(letter) if letter.isupper():
            return letter if names_letter(text, letter) else None
        case UnorderedItems(items) if all(isinstance(item, Words) and len(item.text) == 1 for item in items):
            return chosen_letters(text)
        case UnorderedItems() | BracketedItems("()" | "{}"):
            return assigned_in_lines(text, parse)
    return None


def _last_line(text: str) -> str:
    """Return the last line of a text without its markup."""
    return _MARKS.sub("", text.strip().rpartition("\n")[2]).strip()


def _last_sentence(line: str) -> str:
    return _END_OF_SENTENCE.split(line)[-1].rstrip(" .!")
