"""The interface of rewards: from a finished conversation to a number."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import nan
from numbers import Real
from typing import ClassVar, Literal

from rlkit.base.errors import shorten, show, with_definition
from rlkit.base.ranges import LARGEST_FLOAT
from rlkit.base.text import part_name
from rlkit.interfaces.runtime import BoundPart
from rlkit.types import Prompt, Score, Trajectory

LONGEST_ANSWER = 500
"""Most characters of a final answer."""

LONGEST_FEEDBACK = 4000
"""Most characters of feedback."""

MAX_COMPONENTS = 256
COMPONENT = re.compile(r"(?=.{1,64}$)[\w@][\w .@:%()+=-]*(/[\w@][\w .@:%()+=-]*)*")
"""The names of components, which become metrics and columns."""

NUMBERS = (float, int, Real)
"""Types of numbers; those that are checked fastest first."""

OnError = Literal["drop", "retry", "raise"]
"""What a run does with a group in which a reward failed."""


class RewardManager(BoundPart):
    """Scores the samples of one prompt together, in the trainer's process, without blocking.

    Subclass it for rewards that await a service, need the run's device, or combine other rewards. Plain code belongs
    in a `RewardFunction`, which runs in a process that can be killed.

    `timeout` is in seconds, from the start of the work. If a score fails, `on_error` decides: `drop` leaves the
    prompt's group out of the step, `retry` scores once more and then drops, `raise` ends the run. Failures are always
    counted, and never become a reward of 0.
    """

    may_fill: ClassVar[Sequence[str]] = ("token", "turn", "row")
    timeout: float = 60.0
    on_error: OnError = "drop"
    concurrency: int | None = None
    """Most calls of a `RewardFunction` at once; None for the number of CPUs."""
    components: Sequence[str] | None = None
    """Names of the components of its scores; None if they are unknown before a run."""

    @abstractmethod
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory, in order; an accuracy is the component `accuracy`.

        All trajectories of a call belong to one prompt. In training they are the samples of its group, without failed
        conversations. There are fewer for greedy completions, in validation and before a run. A retry has those that
        failed.
        """

    def unscorable(self, prompt: Prompt) -> str | None:
        """Explain why no completion of a prompt can be scored, such as an unreadable reference; None if it can be.

        Called in the trainer's process for the rows that a run uses, before any model is loaded and before `bind`.
        """
        return None

    def effect(self) -> str | None:
        """Name what scoring does besides computing, such as `asks http://judge:8000`; None if nothing.

        `rlkit recipe check` tries a reward with an effect only if it is told to.
        """
        return None

    def counts(self) -> Mapping[str, float]:
        """Return totals since the reward was created, by name; a step logs how much each has grown as `reward/NAME`.

        Called in the trainer's thread.
        """
        return {}


class RewardFunction(RewardManager):
    """Scores one trajectory with plain code, in a worker process that is killed at the deadline.

    Instances are pickled into the worker, where only `grade` is called.
    """

    timeout: float = 10.0

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        if "grade" in vars(cls) and "grade_at_once" not in vars(cls):  # its base's is a shortcut of another `grade`
            cls.grade_at_once = RewardFunction.grade_at_once  # type: ignore[method-assign]

    @abstractmethod
    def grade(self, trajectory: Trajectory) -> Score | float | None:
        """Return the score, None for no opinion; an accuracy is the component `accuracy`."""

    def grade_at_once(self, trajectory: Trajectory) -> Score | None:
        """Return the score if `grade` is sure to take microseconds; None leaves the trajectory to a worker.

        Called in the trainer's process on the event loop of all rollouts, so it must not read long texts or wait.
        """
        return None

    def control(self, trajectory: Trajectory) -> Trajectory | None:
        """Return a gradable completion of the same prompt, such as the reference; None if there is none.

        If `grade` raises, hangs or dies on a completion but not on its control, the completion is at fault. Its score
        is then `ungradable()` and is counted, so that a policy cannot evade its score. Otherwise the score fails.
        """
        return None

    def ungradable(self) -> Score:
        """Return the score of a completion on which `grade` fails, though not on its `control`."""
        return Score(0.0, ungradable=True)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return scores graded in this process; a run grades in a worker instead."""
        return [as_score(self.grade(trajectory)) for trajectory in trajectories]


def sum_counts(rewards: Iterable[RewardManager]) -> Counter[str]:
    """Return the totals of several rewards by name; see `RewardManager.counts`."""
    totals: Counter[str] = Counter()
    for reward in rewards:
        totals.update(reward.counts())  # type: ignore[arg-type]
    return totals


def scoring_method(reward: RewardManager) -> str:
    """Return the name of the method in which a reward scores."""
    return "grade" if isinstance(reward, RewardFunction) else "score"


def as_score(value: object, source: RewardManager | str = "the reward") -> Score:
    """Convert what `source` returned to a score of plain data; anything but numbers of float32 becomes an error.

    None is no opinion, as the reward or as a component.
    """
    score = value if isinstance(value, Score) else Score(value)  # type: ignore[arg-type]
    if score.error is not None:
        return Score(None, error=shorten(str(score.error)))
    try:
        components = {str(name): as_number(value) for name, value in score.components.items() if value is not None}
        wrong = next((name for name in components if not COMPONENT.fullmatch(name)), None)
        if wrong is not None or len(components) > MAX_COMPONENTS:
            problem = f"{len(components):,} components" if wrong is None else f"the component {show(wrong, 80)}"
            expected = f"at most {MAX_COMPONENTS} names of at most 64 letters, digits, spaces and _ . @ : % ( ) + = - /"
            return _refused(source, f"{problem}, expected {expected}")
        turns = None if score.turn_rewards is None else [as_number(turn) for turn in score.turn_rewards]
        tokens = None if score.token_rewards is None else [as_number(token) for token in score.token_rewards]
        answer = None if score.answer is None else as_text(score.answer, LONGEST_ANSWER)
        feedback = None if score.feedback is None else as_text(score.feedback, LONGEST_FEEDBACK) or None
        reward = None if score.reward is None else as_number(score.reward)
        ungradable, fields = bool(score.ungradable), dict(score.fields)
        return Score(reward, components, turns, None, ungradable, answer, feedback, tokens, fields)
    except Exception:  # foreign objects may raise anything
        texts = {"an answer": score.answer, "feedback": score.feedback}
        named = "".join(f", and text as {name}" for name, text in texts.items() if text is not None)
        expected = f"finite numbers up to {LARGEST_FLOAT:g}{named}"
        return _refused(source, f"{show(value)}, expected {expected}")


def _refused(source: RewardManager | str, returned: str) -> Score:
    if isinstance(source, str):
        return Score(None, error=f"{source} returned {returned}")
    return Score(
        None, error=with_definition(f"{part_name(source)} returned {returned}", source, scoring_method(source))
    )


def as_text(value: object, longest: int) -> str:
    """Return an answer or feedback as a text of bounded length.

    Raises:
        ValueError: It is no text.
    """
    if not isinstance(value, str):
        raise ValueError(f"got {show(value)}, expected text")
    return shorten(str(value), longest)


def as_number(value: object) -> float:
    """Return a number of Python, NumPy or torch as a float.

    Raises:
        Exception: It is not a number, not finite, or could overflow float32.
    """
    if type(value) is float:  # the usual type, without the slower checks
        number = value
    else:
        if not isinstance(value, NUMBERS):
            item = getattr(value, "item", None)
            value = item() if callable(item) else value
        number = float(value) if isinstance(value, NUMBERS) else nan
    if not abs(number) <= LARGEST_FLOAT:  # also for NaN
        raise ValueError(f"got {show(value)}, expected a finite number up to {LARGEST_FLOAT:g}")
    return number


def grade_as_data(reward: RewardFunction, trajectory: Trajectory) -> dict[str, object]:
    """Grade a trajectory in a worker; return the fields of the score, since a worker returns only data."""
    score = as_score(reward.grade(trajectory), reward)
    lists = {name: getattr(values, "tolist", lambda values=values: values)() for name, values in score.fields.items()}
    return vars(score) | {"fields": lists}


def grade_control(call: tuple[RewardFunction, Trajectory]) -> dict[str, object] | None:
    """Grade a trajectory's control in a worker; return the score of what is ungradable, None if that fails too."""
    reward, trajectory = call
    control = reward.control(trajectory)
    if control is None or as_score(reward.grade(control)).error is not None:
        return None
    return vars(as_score(reward.ungradable()))
