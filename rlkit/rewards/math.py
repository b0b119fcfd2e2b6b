"""A reward for answers that are numbers or formulae."""

from __future__ import annotations

from rlkit.ops.answers import equal, final_answer
from rlkit.ranges import FiniteFloat, Seconds
from rlkit.roles.reward import OnError, RewardFunction
from rlkit.types import Score, Trajectory


class MathReward(RewardFunction):
    """1 if the final answer equals the reference's as mathematics; else 0.

    The final answer is the last `#### x`, else the last `\\boxed{x}`, else the last number of the text. Equal numbers
    are equal at once; anything else is compared by math-verify.

    Args:
        format_weight: Added where the answer was marked by `####` or `\\boxed{}`.
        timeout: Seconds for one trajectory, from the start of the work.
        on_error: What becomes of a group with a failed score.
    """

    parts = ("accuracy", "format")

    def __init__(self, format_weight: FiniteFloat = 0.0, timeout: Seconds = 10.0, on_error: OnError = "drop") -> None:
        self.format_weight = format_weight
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        if trajectory.prompt.answer is None:
            return Score(None, error=f"prompt {trajectory.prompt.id!r} has no answer to compare with")
        expected, _ = final_answer(trajectory.prompt.answer)
        given, marked = final_answer(trajectory.text)
        if expected is None:
            return Score(None, error=f"prompt {trajectory.prompt.id!r} has no answer in {trajectory.prompt.answer!r}")
        right = float(given is not None and equal(given, expected))
        return Score(right + self.format_weight * marked, {"accuracy": right, "format": float(marked)})
