"""Rewards from Python functions, named in a recipe or passed in Python."""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import pickle
from collections.abc import Awaitable, Callable, Sequence
from functools import cache

import cloudpickle

from rlkit.base.errors import RecipeError, explain, explain_foreign
from rlkit.base.functions import load_once, require_function
from rlkit.base.ranges import Count, Seconds
from rlkit.interfaces.reward import OnError, RewardFunction, RewardManager, as_score
from rlkit.rewards.python_call import Completions, Grader, with_own_prompt
from rlkit.types import Score, Trajectory


class PythonReward(RewardFunction):
    """Calls a function, sync or async, in a worker process.

    The function takes any of these arguments by name: `completion` or `text` (the last turn), `answer`, `messages` (the
    prompt's), any column of the data, `meta` (all columns), `trajectory`, and after a rollout of an agent `agent` (its
    `folder`, exit `status` and `output`). A function that takes both `completion` and
    `text` gets the data's column as `text`. It returns a number, a `Score`, None for no opinion, or a mapping of
    components with the reward under `reward`, and perhaps a text under `feedback` (`teacher.attempts`).

    A function with the argument `completions` is called as TRL calls reward functions, with lists of one element. It
    may take `prompts`, `completions`, `completion_ids`, `answer` and the fields of `meta`, or all of them by
    `**columns`, and returns a list with one number. `BatchReward` passes the samples of a prompt together.

    A function with the argument `solution_str` is called as verl calls `compute_score`: with `data_source`,
    `solution_str`, `ground_truth` and `extra_info`; it returns a number, or a mapping with the reward under `score`.

    Args:
        function: `file.py:name` or `package.module:name`.
        completions: The elements of `completions` and `prompts`: chat messages or texts.
        allow_code: Must be true, since the recipe runs the function's code.
        timeout: Seconds for one trajectory, from the start of the work.
        concurrency: Maximum concurrent calls; null for the number of CPUs.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        function: str,
        allow_code: bool = False,
        *,
        completions: Completions = "messages",
        timeout: Seconds = 10.0,
        concurrency: Count | None = None,
        on_error: OnError = "drop",
    ) -> None:
        self.allow_code = allow_code
        require_function("PythonReward", function, self.allow_code)
        self.function = function
        self.completions = completions
        self.timeout = timeout
        self.concurrency = concurrency
        self.on_error = on_error

    def effect(self) -> str:
        return f"runs {self.function}"

    def grade(self, trajectory: Trajectory) -> Score | float:
        return Grader(self.function, load_once(self.function), self.completions).grade(trajectory)


class FunctionReward(RewardFunction):
    """Calls a function object, sync or async, in a worker process; only for Python, since a recipe cannot name it.

    The function may be defined anywhere, even in a script or a notebook. It is sent by value when this object is
    created, together with the globals that it reads. Changes to these stay in the worker.

    Args:
        function: A function with the arguments and results of `PythonReward`.
        completions: The elements of `completions` and `prompts`: chat messages or texts.
        timeout: Seconds for one trajectory, from the start of the work.
        concurrency: Maximum concurrent calls; None for the number of CPUs.
        on_error: What happens to a group with a failed score.

    Raises:
        RecipeError: The function cannot be sent to another process.
    """

    def __init__(
        self,
        function: Callable[..., object],
        *,
        completions: Completions = "messages",
        timeout: Seconds = 10.0,
        concurrency: Count | None = None,
        on_error: OnError = "drop",
    ) -> None:
        try:
            self._pickled = cloudpickle.dumps(function)
        except Exception as error:  # pickling runs foreign code
            raise RecipeError(
                f"reward {_name(function)} cannot be sent to a worker process: {explain(error)}; create what it uses "
                "inside the function, or make it `async def` to run it in this process"
            ) from error
        self._description = _describe(function)
        self._name = _name(function)
        self.completions = completions
        self.timeout = timeout
        self.concurrency = concurrency
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score | float:
        return Grader(self._name, _unpickled(self._pickled), self.completions).grade(trajectory)

    def __repr__(self) -> str:
        return f"FunctionReward({self._description})"


class AsyncFunctionReward(RewardManager):
    """Awaits a coroutine function on the run's event loop, in the trainer's process; only for Python.

    The function shares the objects of the script or notebook that defines it, and must await whatever takes time. This
    suits functions that call a service.

    Args:
        function: A coroutine function with the arguments and results of `PythonReward`.
        completions: The elements of `completions` and `prompts`: chat messages or texts.
        timeout: Seconds for the samples of one prompt.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        function: Callable[..., Awaitable[object]],
        *,
        completions: Completions = "messages",
        timeout: Seconds = 60.0,
        on_error: OnError = "drop",
    ) -> None:
        self._grader = Grader(_name(function), function, completions)
        self._description = _describe(function)
        self.timeout = timeout
        self.on_error = on_error

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return list(await asyncio.gather(*map(self._score, trajectories)))

    async def _score(self, trajectory: Trajectory) -> Score:
        try:
            return as_score(self._grader.read(await self._grader.call(with_own_prompt(trajectory))))
        except Exception as error:  # a user's code may raise anything, which fails only its own sample
            return Score(None, error=explain_foreign(error))

    def __repr__(self) -> str:
        return f"AsyncFunctionReward({self._description})"


@cache
def _unpickled(function: bytes) -> Callable[..., object]:
    """Return the function, the same object for all calls in a worker, since it may keep state between them."""
    return pickle.loads(function)  # type: ignore[no-any-return]


def _name(function: Callable[..., object]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _describe(function: Callable[..., object]) -> str:
    """Return a function's name with a digest of its code, which differs between functions of the same name."""
    try:
        code = inspect.getsource(function)
    except (OSError, TypeError):  # it was typed at a prompt, or is another callable
        compiled = getattr(function, "__code__", None)
        code = "" if compiled is None else compiled.co_code.hex()
    return f"{_name(function)}, code {hashlib.sha256(code.encode()).hexdigest()[:8]}"
