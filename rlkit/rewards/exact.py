"""A reward for answers that equal the text of the reference."""

from __future__ import annotations

from rlkit.base.ranges import Seconds
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.types import Score, Trajectory


class ExactReward(RewardFunction):
    """1 if the last turn's text equals the prompt's answer up to leading and trailing blanks, else 0.

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
        answer, expected = trajectory.text.strip(), trajectory.prompt.answer.strip()
        if self.ignore_case:
            answer, expected = answer.casefold(), expected.casefold()
        right = float(answer == expected)
        return Score(right, {"accuracy": right}, answer=answer)

    def grade_at_once(self, trajectory: Trajectory) -> Score | None:
        return self.grade(trajectory)
