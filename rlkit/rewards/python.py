"""A reward that is any Python function."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from rlkit.errors import RecipeError, show
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.ranges import Count, Seconds
from rlkit.types import Score, Trajectory


class PythonReward(RewardFunction):
    """Calls a function, sync or async, in a worker process.

    The function takes any of these by name: `text` (the last turn), `answer`, `messages` (the prompt's), `meta` and
    its fields, `trajectory`. It returns a number, a `Score`, or a mapping of components with the reward under `reward`.

    One that takes `completions` is called as TRL calls reward functions, with lists that have one entry: it may take
    `prompts`, `completions`, `completion_ids`, `answer` and the fields of `meta`, all of them by `**columns`, and
    returns a list with one number.

    Args:
        function: `file.py:name`, or `package.module:name`.
        completions: What `completions` and `prompts` hold: chat messages, or texts.
        allow_code: Must be true for a function from a file: the recipe then runs that file's code.
        timeout: Seconds for one trajectory, from the start of the work.
        concurrency: Calls at once; null for as many as there are CPUs.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        function: str,
        allow_code: bool = False,
        *,
        completions: Literal["messages", "text"] = "messages",
        timeout: Seconds = 10.0,
        concurrency: Count | None = None,
        on_error: OnError = "drop",
    ) -> None:
        place, _, name = function.rpartition(":")
        if not place or not name.isidentifier():
            raise RecipeError(f"PythonReward has function={function!r}, expected file.py:name or package.module:name")
        self.allow_code = allow_code
        if not self.allow_code:
            raise RecipeError(
                f"PythonReward names {function!r}, whose code would run; set allow_code: true if you trust it"
            )
        if place.endswith(".py") and not Path(place).is_file():
            raise RecipeError(f"PythonReward has function={function!r}, but there is no file {place!r}")
        self.function = function
        self.completions = completions
        self.timeout = timeout
        self.concurrency = concurrency
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score | float:
        function, parameters = _load(self.function)
        in_lists = "completions" in parameters
        known = self._columns(trajectory) if in_lists else _fields(trajectory)
        value = function(**_arguments(self.function, parameters, known))
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        if in_lists:
            if not hasattr(value, "__len__") or len(value) != 1:
                raise ValueError(f"{self.function} returned {show(value)}, expected a list with one number")
            value = value[0]
        if isinstance(value, dict):
            if "reward" not in value:
                raise ValueError(f"{self.function} returned the components {list(value)}, expected one named 'reward'")
            return Score(value["reward"], {name: component for name, component in value.items() if name != "reward"})
        return value  # type: ignore[no-any-return]

    def _columns(self, trajectory: Trajectory) -> dict[str, Any]:
        """Return the columns for a function over batches, as a batch of one."""
        prompt = trajectory.prompt
        completion = trajectory.messages[len(prompt.messages) :]
        texts: tuple[object, object] = (prompt.messages, completion)
        if self.completions == "text":
            texts = "\n\n".join(str(message["content"]) for message in prompt.messages), trajectory.text
        tokens = [token for token, chosen in zip(trajectory.tokens, trajectory.mask, strict=True) if chosen]
        columns = {**prompt.meta, "answer": prompt.answer, "prompts": texts[0], "completions": texts[1]}
        return {name: [value] for name, value in {**columns, "completion_ids": tokens}.items()}


def _fields(trajectory: Trajectory) -> dict[str, Any]:
    """Return what a function for one trajectory may take."""
    prompt = trajectory.prompt
    own = {"text": trajectory.text, "answer": prompt.answer, "messages": prompt.messages, "meta": prompt.meta}
    return {**prompt.meta, **own, "trajectory": trajectory}


def _arguments(function: str, parameters: Mapping[str, inspect.Parameter], known: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes.

    Raises:
        TypeError: It asks for one that there is not.
    """
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        names = dict.fromkeys(known)
    else:
        names = dict.fromkeys(name for name in parameters if name in known)
    for name, parameter in parameters.items():
        optional = parameter.default is not parameter.empty or parameter.kind in (
            parameter.VAR_KEYWORD,
            parameter.VAR_POSITIONAL,
        )
        if not optional and name not in known:
            offered = "" if "completions" in known else "; or completions, prompts, completion_ids in lists"
            raise TypeError(f"{function} asks for {name!r}, expected any of: {', '.join(known)}{offered}")
    return {name: known[name] for name in names}


async def _await(value: Any) -> Any:
    return await value


@cache
def _load(function: str) -> tuple[Callable[..., Any], Mapping[str, inspect.Parameter]]:
    """Import the function, once a worker, and look which arguments it takes."""
    place, _, name = function.rpartition(":")
    if place.endswith(".py"):
        spec = importlib.util.spec_from_file_location("rlkit_python_reward", place)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    found = getattr(module, name)
    return found, inspect.signature(found).parameters
