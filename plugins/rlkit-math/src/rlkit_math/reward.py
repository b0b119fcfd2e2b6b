"""A reward for answers that are numbers or formulae."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import NamedTuple

from rlkit.base.errors import show
from rlkit.base.ranges import NonNegativeFloat, Seconds
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.types import Prompt, Score, StopReason, Trajectory
from rlkit_math.answers import UngradableError, canonical, equal, equal_at_once, final_answer, reference_of

SHORT = 2000
"""Maximum characters of a text that is graded at once, without a worker process."""

CUT_OFF = (StopReason.LENGTH, StopReason.CONTEXT, StopReason.ERROR)


class MathReward(RewardFunction):
    """1 if the final answer is mathematically equal to the reference, else 0.

    Thinking (`<think>`, the channel `analysis`) holds no answer, and thinking that never ends leaves none.

    The final answer is the text after the last `####`, else the content of the last `\\boxed{x}`, else the only
    `answer` of a JSON object at the end, else what a sentence or heading announces (`The answer is 5.`), else the value
    that the last line states (`the area is $25\\pi$`), else the last number, in digits or, if its sentence has no
    other, in words. After a marker, only a number with its unit is accepted, or one supported form: a fraction, a
    power, a formula, a list, a set, a tuple, an interval, a matrix, an equation, an inequality, residues, a number in
    another base or in words, a time, a date, or words. Anything else is wrong: several guesses, `72 is wrong`, `> 72`,
    `72 tens`, `72_8`. `50%` equals both 50 and 0.5. Known units are converted; a unit that only one of both has does
    not count. Of a value in two notations (`1/8, or 12.5%`), both must be right. An unfinished calculation (`48 + 24`)
    does not equal a number. An answer that the text after it takes back is none.
    Without a marker, a reference in words or of several names may stand in the last sentence, or in the last lines.
    If an explanation with a heading (`Reasoning:`) follows the first line, the answer is in that line.

    References are parsed the same way, but completely: the text after `####`, a box, or all of the text. Rows whose
    reference is in no supported form are refused when the data are loaded, or dropped: see `rollout.unscorable`.

    The component `strict` is 1 if the right answer is marked by `####` or `\\boxed{}`. `format` is 1 if a number or a
    formula is marked, right or wrong, in a completion that was not cut off.

    An answer that cannot be graded, because it is too large or because the grader fails on it but not on the
    reference, is wrong and counts as `reward/ungradable`.

    Args:
        format_weight: Weight of `format` in the reward.
        timeout: Seconds for one trajectory, from the start of the work.
        on_error: What happens to a group with a failed score.
    """

    components = ("accuracy", "strict", "format")

    def __init__(
        self, format_weight: NonNegativeFloat = 0.0, timeout: Seconds = 10.0, on_error: OnError = "drop"
    ) -> None:
        self.format_weight = format_weight
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        score = self._score(trajectory, partial(_judge, same=equal))
        assert score is not None  # `equal` always decides
        return score

    def grade_at_once(self, trajectory: Trajectory) -> Score | None:
        length = max(len(trajectory.text), len(trajectory.prompt.answer or ""))
        return None if length > SHORT else self._score(trajectory, _judge_at_once)

    def _score(self, trajectory: Trajectory, judge: Callable[[str, str], Judgement | None]) -> Score | None:
        """Return the score; None if `judge` cannot decide whether the answer equals the reference."""
        expected = reference_of(trajectory.prompt.answer or "")
        if expected is None:
            return Score(None, error=f"prompt {trajectory.prompt.id!r} {self.unscorable(trajectory.prompt)}")
        try:
            judgement = judge(after_thinking(trajectory.opened_thinking + trajectory.text), expected)
        except UngradableError:
            return self.ungradable()
        if judgement is None:
            return None
        right, marked, answer = judgement
        credit = float(marked and trajectory.stop not in CUT_OFF)
        components = {"accuracy": float(right), "strict": float(right and marked), "format": credit}
        return Score(right + self.format_weight * credit, components, answer=answer)

    def unscorable(self, prompt: Prompt) -> str | None:
        if prompt.answer is None:
            return "has no answer to compare with"
        if reference_of(prompt.answer) is None:
            return f"has the answer {show(prompt.answer)}, which is in no form that MathReward supports"
        return None

    def control(self, trajectory: Trajectory) -> Trajectory | None:
        return replace(trajectory, text=trajectory.prompt.answer or "", messages=[], opened_thinking="")

    def ungradable(self) -> Score:
        return Score(0.0, dict.fromkeys(self.components, 0.0), ungradable=True, answer="")


class Judgement(NamedTuple):
    """Whether the final answer of a text is right, whether it is marked, and its canonical form."""

    right: bool
    marked: bool
    answer: str


def _judge(text: str, expected: str, same: Callable[[str, str], bool | None]) -> Judgement | None:
    """Check whether a text is right; None if `same` cannot decide.

    Raises:
        UngradableError: The answer is too large to be compared.
    """
    answer, marked = final_answer(text, expected)
    right = answer is not None and same(answer, expected)
    return None if right is None else Judgement(right, marked, canonical(answer or ""))


@lru_cache(1024)  # the samples of a prompt are often the same
def _judge_at_once(text: str, expected: str) -> Judgement | None:
    return _judge(text, expected, equal_at_once)
