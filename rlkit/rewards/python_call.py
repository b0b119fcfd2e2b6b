"""Calls of a user's function: the arguments that it names, and the scores that it returns."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal, NamedTuple
from unicodedata import normalize

from rlkit.base.errors import show
from rlkit.base.text import similar
from rlkit.interfaces.content import json_messages
from rlkit.interfaces.reward import as_score
from rlkit.types import JsonObject, Score, Trajectory

Completions = Literal["messages", "text"]
"""How a function over lists receives completions and prompts."""


class Grader(NamedTuple):
    """A user's function, called with the arguments that it names.

    Args:
        name: Name of the function in messages.
        function: The function.
        completions: The elements of `completions` and `prompts`: chat messages or texts.
    """

    name: str
    function: Callable[..., object]
    completions: Completions

    def grade(self, trajectory: Trajectory) -> Score | float:
        """Return the score of a trajectory; a coroutine function is run to completion.

        Raises:
            TypeError: The function has an unknown argument.
            ValueError: The function did not return a score.
        """
        return self.read(_result(self.call(trajectory)))

    def grade_batch(self, trajectories: Sequence[Trajectory]) -> list[Score | float]:
        """Return the scores of trajectories from one call with lists.

        Raises:
            TypeError: The function has an unknown argument.
            ValueError: The function did not return a score for each trajectory.
        """
        trajectories = [with_own_prompt(trajectory) for trajectory in trajectories]
        available = _columns(trajectories, self.completions) | _verl_columns(trajectories)
        values = _result(self.function(**_arguments(self.name, _parameters(self.function), available)))
        return [self._score(value) for value in self._listed(values, len(trajectories))]

    def call(self, trajectory: Trajectory) -> Any:
        """Call the function on a trajectory; an awaitable results if it is a coroutine function."""
        parameters = _parameters(self.function)
        if self._in_lists:
            available = _columns([trajectory], self.completions)
        else:
            available = _fields(trajectory) | (_verl_fields(trajectory) if self._is_verl else {})
            if "completion" in parameters and "text" in trajectory.prompt.meta:
                available["text"] = trajectory.prompt.meta["text"]
        return self.function(**_arguments(self.name, parameters, available))

    def read(self, value: Any) -> Score | float:
        """Return the score in the function's return value for a trajectory."""
        return as_score(self._score(self._listed(value, 1)[0] if self._in_lists else value), self.name)

    def _listed(self, values: Any, count: int) -> Any:
        if not hasattr(values, "__len__") or len(values) != count:
            numbers = "one number" if count == 1 else f"{count} numbers"
            raise ValueError(f"{self.name} returned {show(values)}, expected a list with {numbers}")
        return values

    def _score(self, value: Any) -> Score | float:
        if not isinstance(value, dict):
            return value  # type: ignore[no-any-return]
        key = "score" if self._is_verl else "reward"
        if key not in value:
            raise ValueError(f"{self.name} returned the components {list(value)}, expected one named {key!r}")
        feedback = value.get("feedback")
        is_text = feedback is None or isinstance(feedback, str)  # a number is a component
        components = {
            name: part for name, part in value.items() if name != key and not (name == "feedback" and is_text)
        }
        if self._is_verl:  # whose mapping may hold texts, such as the extracted answer
            components = {name: float(part) for name, part in components.items() if isinstance(part, int | float)}
        return Score(value[key], components, feedback=feedback if is_text else None)

    @property
    def _in_lists(self) -> bool:
        return "completions" in _parameters(self.function)

    @property
    def _is_verl(self) -> bool:
        return not {"solution_str", "solution_strs"}.isdisjoint(_parameters(self.function))


def with_own_prompt(trajectory: Trajectory) -> Trajectory:
    """Return a trajectory whose prompt is its own: what a function changes in a column reaches no other sample."""
    return replace(trajectory, prompt=deepcopy(trajectory.prompt))


def _result(value: Any) -> Any:
    return asyncio.run(_await(value)) if inspect.isawaitable(value) else value


async def _await(value: Awaitable[object]) -> object:
    return await value


def _columns(trajectories: Sequence[Trajectory], completions: Completions) -> dict[str, object]:
    """Return the arguments of a function over lists; None where a row lacks a column."""
    rows = [_column_values(trajectory, completions) for trajectory in trajectories]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _column_values(trajectory: Trajectory, completions: Completions) -> JsonObject:
    prompt = trajectory.prompt
    completion = json_messages(trajectory.messages[len(prompt.messages) :])
    texts: tuple[object, object] = (json_messages(prompt.messages), completion)
    if completions == "text":
        texts = "\n\n".join(str(message["content"]) for message in prompt.messages), trajectory.text
    tokens = [token for token, chosen in zip(trajectory.tokens, trajectory.mask, strict=True) if chosen]
    columns = {"answer": prompt.answer, "prompts": texts[0], "completions": texts[1], "completion_ids": tokens}
    return {**prompt.meta, **columns}


def _fields(trajectory: Trajectory) -> dict[str, object]:
    """Return the arguments available to a function over one trajectory."""
    prompt = trajectory.prompt
    written = dict.fromkeys(("completion", "text"), trajectory.text)
    fields = {**written, "answer": prompt.answer, "messages": json_messages(prompt.messages), "meta": prompt.meta}
    agent = {"agent": trajectory.agent} if trajectory.agent else {}
    return {**prompt.meta, **fields, **agent, "trajectory": trajectory}


def _verl_fields(trajectory: Trajectory) -> dict[str, object]:
    """Return the arguments of verl's `compute_score`; None for a column that the data has not."""
    prompt = trajectory.prompt
    fields = {name: prompt.meta.get(name) for name in ("data_source", "extra_info")}
    return {**fields, "solution_str": trajectory.text, "ground_truth": prompt.answer}


def _verl_columns(trajectories: Sequence[Trajectory]) -> dict[str, object]:
    """Return the arguments of `compute_score` under verl's batch reward manager."""
    rows = [_verl_fields(trajectory) for trajectory in trajectories]
    names = {f"{name}s": name for name in ("data_source", "solution_str", "ground_truth", "extra_info")}
    return {plural: [row[name] for row in rows] for plural, name in names.items()}


def _arguments(
    function: str, parameters: Mapping[str, inspect.Parameter], available: dict[str, object]
) -> dict[str, object]:
    """Return the available arguments that a function takes.

    Raises:
        TypeError: The function requires an argument that is not available.
    """
    # by the names as they are, and as Python reads its own
    columns = {normalize("NFKC", name): name for name in available} | {name: name for name in available}
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name, parameter in parameters.items():
        is_optional = parameter.default is not parameter.empty
        is_optional |= parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if not is_optional and name not in columns:
            hint = similar(name, [field for field in available if field.isidentifier()], "expected any of")
            if hint.startswith("expected") and "completions" not in available:
                hint += "; or completions, prompts, completion_ids in lists"
            raise TypeError(f"{function} has the argument {name!r}, {hint}")
    arguments = {name: available[columns[name]] for name in parameters if name in columns}
    read = {columns[name] for name in arguments}
    return arguments | {name: value for name, value in available.items() if takes_all and name not in read}


def _parameters(function: Callable[..., object]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(function).parameters
