"""Rewards for answers that equal a reference as texts: exactly, or after normalisation."""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from rlkit.base.ranges import Seconds, Share
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.types import Prompt, Score, Trajectory

ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
MAX_TAGS = 10
"""With more opening or closing tags than this, a right answer earns a quarter, as in verl."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class ExactReward(RewardFunction):
    """1 if the last turn, without its thinking, equals the prompt's answer up to outer blanks, else 0.

    Args:
        ignore_case: Whether to ignore upper and lower case.
        timeout: Seconds for one trajectory, from the start of the work.
        on_error: What happens to a group with a failed score.
    """

    components = ("accuracy",)

    def __init__(self, ignore_case: bool = False, timeout: Seconds = 10.0, on_error: OnError = "drop") -> None:
        self.ignore_case = ignore_case
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        if trajectory.prompt.answer is None:
            return Score(None, error=f"prompt {trajectory.prompt.id!r} has no answer to compare with")
        answer = after_thinking(trajectory.opened_thinking + trajectory.text).strip()
        expected = trajectory.prompt.answer.strip()
        if self.ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        right = float(answer == expected)
        return Score(right, {"accuracy": right}, answer=answer)

    def grade_at_once(self, trajectory: Trajectory) -> Score | None:
        return self.grade(trajectory)


class QAReward(RewardFunction):
    """1 if the answer to a question equals one of the references after normalisation, else 0, as in Search-R1.

    The answer is the text in the last `<answer>` tag outside thinking. Normalised are case, the articles a, an and the,
    ASCII punctuation and blanks, as in SQuAD. The references are the row's answer: a text, or as verl has it a list, or
    an object with these under `target`. The components are `accuracy`, the exact match, and `f1`, the largest F1 of the
    words.

    Source: Jin et al. 2025 (arXiv:2503.09516); verl's `search_r1_like_qa_em`.

    Args:
        metric: What is the reward: the exact match `em`, whether the answer contains a reference (`subem`), or `f1`.
        format_score: The reward of a wrong answer in a tag.
        tag: Whether the answer must stand in a tag; otherwise all of a text without one is the answer.
        timeout: Seconds for one trajectory, from the start of the work.
        on_error: What happens to a group with a failed score.
    """

    components = ("accuracy", "f1")

    def __init__(
        self,
        metric: Literal["em", "subem", "f1"] = "em",
        format_score: Share = 0.0,
        tag: bool = True,
        *,
        timeout: Seconds = 10.0,
        on_error: OnError = "drop",
    ) -> None:
        self.metric = metric
        self.format_score = format_score
        self.tag = tag
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        references = references_of(trajectory.prompt.answer)
        if not references:
            return Score(None, error=f"prompt {trajectory.prompt.id!r} {self.unscorable(trajectory.prompt)}")
        text = after_thinking(trajectory.opened_thinking + trajectory.text)
        answers = ANSWER.findall(text)
        if self.tag and not answers:
            return Score(0.0, dict.fromkeys(self.components, 0.0), answer="")
        answer = normalized(answers[-1] if answers else text)
        expected = [normalized(reference) for reference in references]
        accuracy = float(answer in expected)
        f1 = max(word_f1(answer, reference) for reference in expected)
        value = {"em": accuracy, "subem": float(any(text in answer for text in expected)), "f1": f1}[self.metric]
        if max(trajectory.text.count("<answer>"), trajectory.text.count("</answer>")) > MAX_TAGS:
            value /= 4
        return Score(value or self.format_score, {"accuracy": accuracy, "f1": f1}, answer=answer)

    def unscorable(self, prompt: Prompt) -> str | None:
        if references_of(prompt.answer):
            return None
        return "has no answer to compare with" if prompt.answer is None else "has an answer without words"

    def control(self, trajectory: Trajectory) -> Trajectory | None:
        [reference, *_] = references_of(trajectory.prompt.answer) or [""]
        return replace(trajectory, text=f"<answer>{reference}</answer>", messages=[], opened_thinking="")


def references_of(answer: str | None) -> list[str]:
    """Return the reference answers that have words: a text, or JSON of a list, or of an object with `target`."""
    value: object = answer
    if answer is not None and answer.lstrip()[:1] in ("[", "{"):
        try:
            value = json.loads(answer)
        except (ValueError, RecursionError):
            value = answer
    if isinstance(value, Mapping):
        value = value.get("target")
    texts = value if isinstance(value, list) else [value]
    return [str(text) for text in texts if text is not None and normalized(str(text))]


def normalized(text: str) -> str:
    """Return a text without case, articles, ASCII punctuation and superfluous blanks."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def word_f1(answer: str, reference: str) -> float:
    """Return the harmonic mean of precision and recall of the words of normalised texts."""
    words, expected = answer.split(), reference.split()
    common = sum((Counter(words) & Counter(expected)).values())
    return 2 * common / (len(words) + len(expected)) if common else 0.0
