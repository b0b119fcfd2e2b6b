"""DAPO's soft penalty for completions close to the length limit."""

from __future__ import annotations

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NonNegativeFloat, PositiveInt, Seconds
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.types import Score, Trajectory


class Overlong(RewardFunction):
    """0 up to `max_tokens - buffer` tokens of the policy, then decreasing by `factor` over the buffer.

    Beyond `max_tokens` it keeps decreasing. Source: Yu et al. 2025 (arXiv:2503.14476), section 3.4.

    Args:
        max_tokens: The length at which the penalty is `factor`.
        buffer: The number of tokens over which it grows.
        factor: The penalty at `max_tokens`.
        timeout: Seconds for one trajectory, from the start of the work.
        on_error: What happens to a group with a failed score.
    """

    components = ()

    def __init__(
        self,
        max_tokens: PositiveInt,
        buffer: PositiveInt,
        factor: NonNegativeFloat = 1.0,
        *,
        timeout: Seconds = 10.0,
        on_error: OnError = "drop",
    ) -> None:
        if not 0 < buffer <= max_tokens:
            raise RecipeError(
                f"Overlong has buffer={buffer} and max_tokens={max_tokens}, expected 0 < buffer <= max_tokens"
            )
        self.max_tokens = max_tokens
        self.buffer = buffer
        self.factor = factor
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        excess = trajectory.response_length - (self.max_tokens - self.buffer)
        return Score(min(-excess / self.buffer * self.factor, 0.0))

    def grade_at_once(self, trajectory: Trajectory) -> Score | None:
        return self.grade(trajectory)
