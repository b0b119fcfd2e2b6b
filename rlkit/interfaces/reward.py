"""The interface of a reward: from a finished conversation to a number."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

from rlkit.errors import shorten, show
from rlkit.types import Score, Trajectory

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


OnError = Literal["drop", "retry", "raise"]
"""What becomes of a group in which a reward failed."""


class RewardManager(ABC):
    """Scores the samples of one prompt together, in the trainer's process, without blocking it.

    This is the form for rewards that wait (a service), that need the run's device, or that combine other rewards.
    Plain code belongs in a `RewardFunction`, which runs where it can be killed.

    `timeout` is in seconds, from the start of the work. `on_error` says what becomes of the prompt's group when a
    score fails after that: `drop` leaves it out of the step, `retry` max_refills once more and then drops, `raise` ends
    the run. Failures are counted in every case and never become a reward of 0.
    """

    timeout: float = 60.0
    on_error: OnError = "drop"
    concurrency: int | None = None
    """How many calls of a `RewardFunction` may run at once; None takes the machine's number of CPUs."""
    components: Sequence[str] | None = None
    """The names of the components that scores will have, where they are known beforehand."""

    def bind(self, runtime: Runtime) -> None:
        """Receive what exists only once the run does."""

    @abstractmethod
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory, in order. An accuracy, if there is one, is the component `accuracy`.

        A call gets trajectories of exactly ONE prompt: while training all samples of its group, but for conversations
        that failed; of a greedy answer, in validation and before a run fewer; on a retry those whose score failed.
        """


class RewardFunction(RewardManager):
    """Scores one trajectory with plain code, in a worker process that is killed at the deadline.

    Instances are pickled into the worker, where only `grade` is called.
    """

    timeout: float = 10.0

    @abstractmethod
    def grade(self, trajectory: Trajectory) -> Score | float:
        """Return the score. An accuracy, if there is one, is the component `accuracy`."""

    def control(self, trajectory: Trajectory) -> Trajectory | None:
        """Return an answer to the same prompt that can be graded if anything can, such as the reference's; None if
        there is none.

        Where `grade` raises, hangs or dies on an answer but not on its control, the fault is the answer's: it gets
        `ungradable`, and is counted, so that a policy cannot evade its score. Otherwise the score fails.
        """
        return None

    def ungradable(self) -> Score:
        """Return the score of an answer on which `grade` fails, though not on its `control`."""
        return Score(0.0, ungradable=True)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Grade here and now; a run does it in a worker instead."""
        return [as_score(self.grade(trajectory)) for trajectory in trajectories]


def as_score(value: object) -> Score:
    """Turn what a reward gave into a score of plain floats; anything but finite numbers becomes an error."""
    score = value if isinstance(value, Score) else Score(value)  # type: ignore[arg-type]
    if score.error is not None:
        return Score(None, error=shorten(str(score.error)))
    try:
        components = {str(name): as_number(value) for name, value in score.components.items()}
        turns = None if score.turn_rewards is None else [as_number(turn) for turn in score.turn_rewards]
        return Score(as_number(score.reward), components, turns, ungradable=bool(score.ungradable))
    except Exception:  # foreign objects may raise anything
        return Score(None, error=f"the reward gave {show(value)}, expected finite numbers")


def as_number(value: Any) -> float:
    """Return a number of Python, NumPy or torch as a float.

    Raises:
        Exception: It is none, or not finite.
    """
    if not isinstance(value, Real) and callable(getattr(value, "item", None)):
        value = value.item()
    if not isinstance(value, Real) or not math.isfinite(found := float(value)):
        raise ValueError(f"{show(value)} was given, expected a finite number")
    return found


def grade_as_data(call: tuple[RewardFunction, Trajectory]) -> dict[str, Any]:
    """Grade a trajectory in a worker, from which only data comes back: the fields of the score."""
    reward, trajectory = call
    return vars(as_score(reward.grade(trajectory)))


def grade_control(call: tuple[RewardFunction, Trajectory]) -> dict[str, Any] | None:
    """Grade a trajectory's control in a worker; return the score of what is ungradable, None if that fails too."""
    reward, trajectory = call
    control = reward.control(trajectory)
    if control is None or as_score(reward.grade(control)).error is not None:
        return None
    return vars(as_score(reward.ungradable()))
