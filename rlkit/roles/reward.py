"""The role of a reward: from a finished conversation to a number."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from rlkit.types import Score, Trajectory

if TYPE_CHECKING:
    from rlkit.roles.runtime import Runtime


OnError = Literal["drop", "retry", "raise"]
"""What becomes of a group in which a reward failed."""


class RewardManager(ABC):
    """Scores the samples of one prompt together, in the trainer's process, without blocking it.

    This is the form for rewards that wait (a service), that need the run's device, or that combine other rewards.
    Plain code belongs in a `RewardFunction`, which runs where it can be killed.

    `timeout` is in seconds, from the start of the work. `on_error` says what becomes of the prompt's group when a
    score fails after that: `drop` leaves it out of the step, `retry` tries once more and then drops, `raise` ends
    the run. Failures are counted in every case and never become a reward of 0.
    """

    timeout: float = 60.0
    on_error: OnError = "drop"
    concurrency: int | None = None
    """How many calls of a `RewardFunction` may run at once; None takes the machine's number of processors."""
    parts: Sequence[str] | None = None
    """The names of the parts that scores will have, where they are known beforehand."""

    def bind(self, runtime: Runtime) -> None:
        """Receive what exists only once the run does."""

    @abstractmethod
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Give one score per trajectory, in order. An accuracy, if there is one, is the part `accuracy`."""


class RewardFunction(RewardManager):
    """Scores one trajectory with plain code, in a worker process that is killed at the deadline.

    Instances are pickled into the worker, where only `grade` is called.
    """

    timeout: float = 10.0

    @abstractmethod
    def grade(self, trajectory: Trajectory) -> Score | float:
        """Give the score. An accuracy, if there is one, is the part `accuracy`."""

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Grade here and now; a run does it in a worker instead."""
        return [as_score(self.grade(trajectory)) for trajectory in trajectories]


def as_score(value: object) -> Score:
    """Turn what a reward gave into a score; anything but a finite number becomes an error."""
    score = value if isinstance(value, Score) else Score(value)  # type: ignore[arg-type]
    if score.error is not None:
        return score
    numbers = [score.reward, *score.parts.values(), *(score.turn_rewards or ())]
    if not all(isinstance(n, int | float) and math.isfinite(n) for n in numbers):
        return Score(None, error=f"the reward gave {value!r}, expected finite numbers")
    return score
