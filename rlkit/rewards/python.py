"""Rewards from Python functions, named in a recipe or passed in Python."""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import cloudpickle

from rlkit.base.errors import RecipeError, explain, show
from rlkit.base.ranges import Count, Seconds
from rlkit.interfaces.content import json_messages
from rlkit.interfaces.reward import OnError, RewardFunction, RewardManager, as_score
from rlkit.rewards.python_source import missing_function, no_function
from rlkit.types import Score, Trajectory

Completions = Literal["messages", "text"]
"""How a function over batches receives completions and prompts."""


class PythonReward(RewardFunction):
    """Calls a function, sync or async, in a worker process.

    The function takes any of these arguments by name: `completion` or `text` (the last turn), `answer`, `messages` (the
    prompt's), any column of the data, `meta` (all columns), `trajectory`, and after a rollout of an agent `agent` (its
    `folder`, exit `status` and `output`). A function that takes both `completion` and
    `text` gets the data's column as `text`. It returns a number, a `Score`, or a mapping of components with the reward
    under `reward`.

    A function with the argument `completions` is called as TRL calls reward functions, with lists of one element. It
    may take `prompts`, `completions`, `completion_ids`, `answer` and the fields of `meta`, or all of them by
    `**columns`, and returns a list with one number.

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
        module, _, name = function.rpartition(":")
        if not module or not name.isidentifier():
            raise RecipeError(f"PythonReward has function={function!r}, expected file.py:name or package.module:name")
        self.allow_code = allow_code
        if not self.allow_code:
            raise RecipeError(
                f"PythonReward names {function!r}, whose code would run; set allow_code: true if you trust it"
            )
        if module.endswith(".py") and not os.path.isfile(module):
            raise RecipeError(f"PythonReward has function={function!r}, but there is no file {module!r}")
        problem = missing_function(function)
        if problem is not None:
            raise RecipeError(f"PythonReward has function={function!r}, but {problem}")
        self.function = function
        self.completions = completions
        self.timeout = timeout
        self.concurrency = concurrency
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score | float:
        return Grader(self.function, _load(self.function), self.completions).grade(trajectory)


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
            return as_score(self._grader.read(await self._grader.call(trajectory)))
        except Exception as error:  # a user's code may raise anything, which fails only its own sample
            return Score(None, error=explain(error))

    def __repr__(self) -> str:
        return f"AsyncFunctionReward({self._description})"


class Grader(NamedTuple):
    """A user's function, called for one trajectory with the arguments that it names.

    Args:
        name: Name of the function in messages.
        function: The function.
        completions: The elements of `completions` and `prompts`: chat messages or texts.
    """

    name: str
    function: Callable[..., object]
    completions: Completions

    def grade(self, trajectory: Trajectory) -> Score | float:
        """Return the score; a coroutine function is run to completion.

        Raises:
            TypeError: The function has an unknown argument.
            ValueError: The function did not return a score.
        """
        value = self.call(trajectory)
        return self.read(asyncio.run(_await(value)) if inspect.isawaitable(value) else value)

    def call(self, trajectory: Trajectory) -> Any:
        """Return what the function returns; an awaitable if it is a coroutine function."""
        parameters = _parameters(self.function)
        if self._in_lists:
            available = self._columns(trajectory)
        else:
            available = _fields(trajectory) | (_verl_fields(trajectory) if self._is_verl else {})
            if "completion" in parameters and "text" in trajectory.prompt.meta:
                available["text"] = trajectory.prompt.meta["text"]
        return self.function(**_arguments(self.name, parameters, available))

    def read(self, value: Any) -> Score | float:
        """Return the score in the function's return value."""
        if self._in_lists:
            if not hasattr(value, "__len__") or len(value) != 1:
                raise ValueError(f"{self.name} returned {show(value)}, expected a list with one number")
            value = value[0]
        if isinstance(value, dict):
            key = "score" if self._is_verl else "reward"
            if key not in value:
                raise ValueError(f"{self.name} returned the components {list(value)}, expected one named {key!r}")
            components = {name: part for name, part in value.items() if name != key}
            if self._is_verl:  # whose mapping may hold texts, such as the extracted answer
                components = {name: float(part) for name, part in components.items() if isinstance(part, int | float)}
            return Score(value[key], components)
        return value  # type: ignore[no-any-return]

    @property
    def _in_lists(self) -> bool:
        return "completions" in _parameters(self.function)

    @property
    def _is_verl(self) -> bool:
        return "solution_str" in _parameters(self.function)

    def _columns(self, trajectory: Trajectory) -> dict[str, object]:
        """Return the columns of a batch of one trajectory."""
        prompt = trajectory.prompt
        completion = json_messages(trajectory.messages[len(prompt.messages) :])
        texts: tuple[object, object] = (json_messages(prompt.messages), completion)
        if self.completions == "text":
            texts = "\n\n".join(str(message["content"]) for message in prompt.messages), trajectory.text
        tokens = [token for token, chosen in zip(trajectory.tokens, trajectory.mask, strict=True) if chosen]
        columns = {**prompt.meta, "answer": prompt.answer, "prompts": texts[0], "completions": texts[1]}
        return {name: [value] for name, value in {**columns, "completion_ids": tokens}.items()}


def _fields(trajectory: Trajectory) -> dict[str, object]:
    """Return the arguments available to a function over one trajectory."""
    prompt = trajectory.prompt
    messages = json_messages(prompt.messages)
    fields = {"text": trajectory.text, "answer": prompt.answer, "messages": messages, "meta": prompt.meta}
    agent = {"agent": trajectory.agent} if trajectory.agent else {}
    return {"completion": trajectory.text, **prompt.meta, **fields, **agent, "trajectory": trajectory}


def _verl_fields(trajectory: Trajectory) -> dict[str, object]:
    """Return the arguments of verl's `compute_score`; None for a column that the data has not."""
    prompt = trajectory.prompt
    fields = {name: prompt.meta.get(name) for name in ("data_source", "extra_info")}
    return {**fields, "solution_str": trajectory.text, "ground_truth": prompt.answer}


def _arguments(
    function: str, parameters: Mapping[str, inspect.Parameter], available: dict[str, object]
) -> dict[str, object]:
    """Return the available arguments that a function takes.

    Raises:
        TypeError: The function requires an argument that is not available.
    """
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = dict.fromkeys(available)
    else:
        names = dict.fromkeys(name for name in parameters if name in available)
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not optional and name not in available:
            hint = "" if "completions" in available else "; or completions, prompts, completion_ids in lists"
            raise TypeError(f"{function} has the argument {name!r}, expected any of: {', '.join(available)}{hint}")
    return {name: available[name] for name in names}


async def _await(value: Awaitable[object]) -> object:
    return await value


@cache
def _load(function: str) -> Callable[..., object]:
    """Import the function, once per worker."""
    path, _, name = function.rpartition(":")
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location("rlkit_python_reward", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    if name not in functions:
        raise AttributeError(no_function(path, name, functions))
    return getattr(module, name)  # type: ignore[no-any-return]


@cache
def _unpickled(function: bytes) -> Callable[..., object]:
    """Return the function, the same object for all calls in a worker, since it may keep state between them."""
    return pickle.loads(function)  # type: ignore[no-any-return]


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters


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
