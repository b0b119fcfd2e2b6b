"""A reward that is any Python function."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from rlkit.errors import RecipeError
from rlkit.ranges import Count, Seconds
from rlkit.roles.reward import OnError, RewardFunction
from rlkit.types import Score, Trajectory


class PythonReward(RewardFunction):
    """Calls a function, sync or async, in a worker process.

    The function takes any of these by name: `text` (the last turn), `answer`, `messages` (the prompt's), `meta`,
    `trajectory`. It gives a number, or a mapping of parts with the number under `reward`, or a `Score`.

    Args:
        function: `file.py:name`, or `package.module:name`.
        allow_code: Must be true for a function from a file: the recipe then runs that file's code.
        timeout: Seconds for one trajectory, from the start of the work.
        concurrency: Calls at once; null for as many as there are processors.
        on_error: What becomes of a group with a failed score.
    """

    def __init__(
        self,
        function: str,
        allow_code: bool = False,
        *,
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
        self.timeout = timeout
        self.concurrency = concurrency
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score | float:
        function, names = _load(self.function)
        known = {
            "text": trajectory.text,
            "answer": trajectory.prompt.answer,
            "messages": trajectory.prompt.messages,
            "meta": trajectory.prompt.meta,
            "trajectory": trajectory,
        }
        value = function(**{name: known[name] for name in names})
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        if isinstance(value, dict):
            return Score(value["reward"], {k: float(v) for k, v in value.items() if k != "reward"})
        return value  # type: ignore[no-any-return]


async def _await(value: Any) -> Any:
    return await value


@cache
def _load(function: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
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
    return found, tuple(inspect.signature(found).parameters)
