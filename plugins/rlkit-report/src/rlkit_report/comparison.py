"""Two runs side by side, read from their folders."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
import yaml
from torch import Tensor

from rlkit.base.errors import RecipeError, explain
from rlkit.base.files import MAX_JSON_BYTES, read_inside
from rlkit.base.text import counted
from rlkit.models.checkpoints import read_tensors, tensor_shapes
from rlkit.models.store import Store, step_of
from rlkit.recipe.credentials import withhold
from rlkit.records.folder import flat, recipe_data
from rlkit.records.lines import LOGP_DECIMALS, json_rows, nine_digits, step_metrics
from rlkit.types import JsonObject

IGNORED = ("time/", "memory/", "checkpoint/", "engine/")
"""Metrics that measure the machine and not the training."""

AT_ONCE = 2**26
"""Elements of tensors that are read at once."""

SHOWN = 6
"""Metrics of a step that are listed."""

Pairs = dict[str, tuple[object, object]]
"""The values of two runs by name; None where there is none."""


class StepDifference(NamedTuple):
    """The first step whose metrics differ: some of them, and how many others."""

    number: int
    metrics: Pairs
    others: int


class AnswerDifference(NamedTuple):
    """The first row of rollouts that differs."""

    file: str
    row: int
    what: str


class TensorDifference(NamedTuple):
    """The first tensor that differs, in the order of steps and names; in a step, one of another shape comes first."""

    checkpoint: str
    name: str
    what: str


@dataclass
class RunComparison:
    """What differs between two runs."""

    recipe: Pairs = field(default_factory=dict)
    environment: Pairs = field(default_factory=dict)
    steps: int = 0
    """That both have."""
    step: StepDifference | None = None
    answer: AnswerDifference | None = None
    checkpoints: list[str] = field(default_factory=list)
    """That both have, the earliest first."""
    tensor: TensorDifference | None = None

    @property
    def differs(self) -> bool:
        """Whether anything but the environment does."""
        return bool(self.recipe or self.step or self.answer or self.tensor)

    def as_json(self) -> JsonObject:
        """Return it as JSON holds it."""
        parts = {"step": self.step, "answer": self.answer, "tensor": self.tensor}
        named = {name: None if part is None else part._asdict() for name, part in parts.items()}
        return {**vars(self), **named, "differs": self.differs}


def compare(first: Path, second: Path, ignored: tuple[str, ...] = ()) -> RunComparison:
    """Compare two run folders.

    Args:
        first: Folder of one run.
        second: Folder of the other run.
        ignored: What the names of metrics begin with that are not compared, besides those that measure the machine.

    Raises:
        RecipeError: A file cannot be read.
        CheckpointError: A checkpoint is damaged.
    """
    comparison = RunComparison()
    comparison.recipe = _pairs(recipe_of(first), recipe_of(second))
    comparison.environment = _pairs(_environment(first), _environment(second))
    first_steps, second_steps = ({line["step"]: line for line in step_metrics(run)} for run in (first, second))
    shared = {step: (first_steps[step], second_steps[step]) for step in first_steps if step in second_steps}
    comparison.steps = len(shared)
    comparison.step = _first_step(shared, (*IGNORED, *ignored))
    comparison.answer = _first_answer(first, second)
    stores = [Store(str(run / "checkpoints")) for run in (first, second)]
    comparison.checkpoints = sorted(set.intersection(*(set(store.names()) for store in stores)), key=step_of)
    comparison.tensor = _first_tensor(stores[0], stores[1], comparison.checkpoints)
    return comparison


def _pairs(first: Mapping[str, object], second: Mapping[str, object]) -> Pairs:
    keys = dict.fromkeys([*first, *second])
    values = {key: (first.get(key), second.get(key)) for key in keys}
    return {key: (a, b) for key, (a, b) in values.items() if _text(a) != _text(b)}


def _text(value: object) -> str:
    """Return a value as a text, of which NaN has one, and numbers have the same with and without a point."""
    return json.dumps(float(value) if type(value) in (int, float) else value)  # type: ignore[arg-type]


def recipe_of(run: Path) -> dict[str, object]:
    """Return the options of a run's recipe by keys with dots, but for those that are null.

    Raises:
        RecipeError: It cannot be read.
    """
    path = run / "recipe.yaml"
    try:
        return flat(withhold(recipe_data(read_inside(run, "recipe.yaml", MAX_JSON_BYTES).decode())))
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise RecipeError(f"{path} cannot be read: {explain(error)}") from error


def _environment(run: Path) -> dict[str, object]:
    path = run / "environment.json"
    try:
        exists = os.path.exists(path)
        environment = json.loads(read_inside(run, path.name, MAX_JSON_BYTES)) if exists else {}
        environment["command"] = " ".join(environment.get("command", ()))
        environment["plugins"] = ", ".join(f"{p['name']} {p['version']}" for p in environment.get("plugins", ()))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise RecipeError(f"{path} cannot be read: {explain(error)}") from error
    return {key: value for key, value in flat(environment).items() if key != "run_id"}


def _first_step(steps: Mapping[int, tuple[JsonObject, JsonObject]], ignored: tuple[str, ...]) -> StepDifference | None:
    for number, rows in steps.items():
        compared = ({k: nine_digits(v) for k, v in row.items() if not k.startswith(ignored)} for row in rows)
        pairs = _pairs(*compared)
        if pairs:
            return StepDifference(number, dict(list(pairs.items())[:SHOWN]), max(0, len(pairs) - SHOWN))
    return None


def _is_same(first: object, second: object) -> bool:
    """Whether two numbers are the same, or one is the other with the digits of a log-prob that is only read."""
    if not isinstance(first, int | float) or not isinstance(second, int | float):
        return first == second
    rounded = round(first, LOGP_DECIMALS), round(second, LOGP_DECIMALS)
    return nine_digits(first) == nine_digits(second) or second == rounded[0] or first == rounded[1]


def _first_answer(first: Path, second: Path) -> AnswerDifference | None:
    """Return the first row that differs, in the files of the steps that both have, then in those of validations."""
    names = [{path.name for path in (run / "rollouts").glob("*.jsonl.gz")} for run in (first, second)]
    for name in sorted(names[0] & names[1], key=lambda name: (not name.startswith("step-"), name)):
        files = (json_rows(run / "rollouts" / name) for run in (first, second))
        for number, (first_row, second_row) in enumerate(zip_longest(*files), 1):
            what = _differs(first_row, second_row)
            if what:
                return AnswerDifference(name, number, what)
    return None


def _differs(first: JsonObject | None, second: JsonObject | None) -> str | None:
    """Return the first difference of two rows, which causes the others."""
    if first is None or second is None:
        return "only one of the runs has it"
    for key in ("prompt", "messages", "tokens", "logps", "reward", "advantages"):
        a, b = first.get(key), second.get(key)
        if a == b:
            continue
        if not isinstance(a, list) or not isinstance(b, list) or key == "messages":
            return f"{key} {a!r} and {b!r}" if len(repr(a)) < 100 else f"its {key}"
        differing = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if not _is_same(x, y))
        index = next(differing, min(len(a), len(b)))
        if index == len(a) == len(b):
            continue
        values = " and ".join(str(x[index]) if index < len(x) else "its end" for x in (a, b))
        prompt = f"prompt {first['prompt']!r}, " if "prompt" in first else ""
        return f"{prompt}{key}[{index}] is {values}"
    for index, branches in enumerate(zip_longest(first.get("branches", ()), second.get("branches", ()))):
        what = _differs(*branches)
        if what:
            return f"prompt {first['prompt']!r}, branch {index}: {what}"
    return None


def _first_tensor(first: Store, second: Store, names: list[str]) -> TensorDifference | None:
    for name in names:
        first_shapes, second_shapes = tensor_shapes(first, name), tensor_shapes(second, name)
        for tensor in sorted(first_shapes.keys() | second_shapes.keys()):
            if first_shapes.get(tensor) != second_shapes.get(tensor):
                if tensor not in first_shapes or tensor not in second_shapes:
                    return TensorDifference(name, tensor, "only one of the runs has it")
                shapes = (list(first_shapes[tensor]), list(second_shapes[tensor]))
                return TensorDifference(name, tensor, f"shapes {shapes[0]} and {shapes[1]}")
        for group in _groups(first_shapes):
            first_tensors = read_tensors(first, name, group)
            second_tensors = read_tensors(second, name, group)
            for tensor in group:
                what = _unequal(first_tensors[tensor], second_tensors[tensor])
                if what:
                    return TensorDifference(name, tensor, what)
    return None


def _groups(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Yield the names of tensors in order, as many at once as have about `AT_ONCE` elements."""
    group, size = [], 0
    for tensor in sorted(shapes):
        group.append(tensor)
        size += prod(shapes[tensor])
        if size >= AT_ONCE:
            yield group
            group, size = [], 0
    yield group


def _unequal(first: Tensor, second: Tensor) -> str | None:
    if first.dtype != second.dtype:
        return f"{first.dtype} and {second.dtype}"
    if torch.equal(first, second):
        return None
    distance = (first.double() - second.double()).abs()
    count = int((first != second).sum())
    largest = float(distance.nan_to_num(float("inf")).max())
    return f"{count:,} of {first.numel():,} elements, by {largest:.3g} at most"


def lines(comparison: RunComparison) -> Iterator[str]:
    """Yield what is said of the steps, the answers and the tensors of two runs."""
    if comparison.step is None:
        yield f"metrics: the same in the {counted(comparison.steps, 'step')} that both have"
    else:
        names = ", ".join(
            f"{name} {value_text(a)} and {value_text(b)}" for name, (a, b) in comparison.step.metrics.items()
        )
        more = f", and {comparison.step.others} others" if comparison.step.others else ""
        yield f"metrics: the first step that differs is {comparison.step.number}: {names}{more}"
    if comparison.answer is None:
        yield "answers: the same in all rollouts that both have"
    else:
        answer = comparison.answer
        yield f"answers: the first that differs is in {answer.file}, row {answer.row}: {answer.what}"
    if comparison.tensor is not None:
        where = f"{comparison.tensor.name} in {comparison.tensor.checkpoint}"
        yield f"tensors: the first that differs is {where}: {comparison.tensor.what}"
    else:
        listed = ", ".join(comparison.checkpoints)
        yield (
            f"tensors: the same in {listed}" if listed else "weights: not compared, no checkpoint of this step was kept"
        )


def value_text(value: object) -> str:
    """Return a value of a comparison as text."""
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
