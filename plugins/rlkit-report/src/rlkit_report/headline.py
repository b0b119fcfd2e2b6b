"""The headline of a run: what it trains on what, how far it is, what has changed, and the command that goes on."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import yaml

from rlkit.base.text import counted
from rlkit.recipe.yaml_text import load_yaml
from rlkit.records.rewards import REWARD_METRICS, RewardHistory, repeats
from rlkit.records.verdict import CHANGES, VERDICT_METRICS, next_command
from rlkit.types import JsonObject

MAX_NAME = 120
"""Characters of a name that are shown."""


Columns = Mapping[str, list[float | str | None]]


def headline(run: Path, recipe_text: str, environment: JsonObject, result: JsonObject, metrics: Columns) -> JsonObject:
    """Return the headline as JSON holds it; what a file lacks, or has in another shape, is left out.

    Args:
        run: The run folder.
        recipe_text: The text of its recipe.
        environment: The content of `environment.json`.
        result: The content of `result.json`; empty while there is none.
        metrics: A column of values by name, None for steps without it.
    """
    recipe = recipe_tree(recipe_text)
    status = result.get("status")
    facts = {
        "model": _model(recipe),
        "task": _part(recipe.get("task")),
        "reward": _part(recipe.get("reward")),
        "method": _method(recipe),
        "recipe": _recipe_name(environment),
        "devices": environment.get("devices"),
    }
    verdict, history = result.get("verdict"), _history(metrics)
    change = verdict.get("change") if isinstance(verdict, dict) else None
    # with a teacher, rewards do not decide what is learned
    diagnosis = None if isinstance(recipe.get("teacher"), dict) else history.problem(is_over=status == "ok")
    warnings = [text for text in _list(result.get("warnings")) if isinstance(text, str)]
    error = result.get("error")
    return {
        "status": status if isinstance(status, str) else "in progress",
        "steps": _at(recipe, "train", "steps"),
        "seconds": result.get("seconds"),
        "facts": {name: value[:MAX_NAME] for name, value in facts.items() if value and isinstance(value, str)},
        "verdict": change if isinstance(change, str) and change in CHANGES else None,
        "changes": _changes(metrics) or _reward_changes(history),
        "diagnosis": diagnosis,
        "warnings": [text for text in warnings if not repeats(text, diagnosis)],
        "error": error.get("message") if isinstance(error, dict) else None,
        "command": _command(run, recipe, status == "ok"),
    }


def recipe_tree(text: str) -> JsonObject:
    """Return a run's recipe as data; empty if it cannot be read."""
    try:
        recipe = load_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return {}
    return recipe if isinstance(recipe, dict) else {}


def _at(recipe: object, *names: str) -> object:
    """Return the option of a name within a name; None if there is none."""
    for name in names:
        recipe = recipe.get(name) if isinstance(recipe, dict) else None
    return recipe


def _part(section: object) -> str | None:
    """Return a component's class without its package, and its data's path or its function, if it has one."""
    path = section if isinstance(section, str) else _at(section, "class_path")
    if not isinstance(path, str):
        return None
    source = _at(section, "init_args", "path") or _at(section, "init_args", "function")
    return path.rpartition(".")[2] + (f" ({source})" if isinstance(source, str) else "")


def _model(recipe: JsonObject) -> str | None:
    path, rank = _at(recipe, "model", "path"), _at(recipe, "model", "lora", "rank")
    adapters = "DoRA" if _at(recipe, "model", "lora", "use_dora") else "LoRA"
    if not isinstance(path, str):
        return None
    kind = ", reward model" if _at(recipe, "model", "head") == "score" else ""
    return f"{path}{kind}" + (f", {adapters} of rank {rank}" if isinstance(rank, int) else "")


def _method(recipe: JsonObject) -> str:
    recorded = (_part(_at(recipe, "rollout", "engine")) or "").startswith("Recorded")
    names = [_part(recipe.get("advantage")), _part(recipe.get("loss")), "recorded answers" if recorded else None]
    return ", ".join(name for name in names if name)


def _recipe_name(environment: JsonObject) -> str | None:
    """Return the recipe that the command line names first, without its folder."""
    words = [word for word in _list(environment.get("command")) if isinstance(word, str)]
    for word, following in pairwise([*words, ""]):
        if word in ("fit", "--recipe") and following and not following.startswith("-"):
            return os.path.basename(following).removesuffix(".yaml")
        if word.startswith("--recipe="):
            return os.path.basename(word).removeprefix("--recipe=").removesuffix(".yaml")
    return None


def _changes(metrics: Columns) -> list[JsonObject]:
    """Return the changes of accuracy and reward; a reward that is the accuracy is left out."""
    changes: list[JsonObject] = []
    for name in VERDICT_METRICS:
        same = name.replace("reward", "accuracy")
        is_accuracy = same != name and metrics.get(f"validation/{same}") == metrics.get(f"validation/{name}")
        row = None if is_accuracy else _change(name, metrics)
        changes += [] if row is None else [row]
    return changes


def _history(metrics: Columns) -> RewardHistory:
    """Return the rewards of all steps so far."""
    history = RewardHistory()
    names = [name for name in REWARD_METRICS if name in metrics]
    for values in zip(*(metrics[name] for name in names), strict=True):
        history.see({name: value for name, value in zip(names, values, strict=True) if isinstance(value, int | float)})
    return history


def _reward_changes(history: RewardHistory) -> list[JsonObject]:
    """Describe the change of the mean reward of the run's own samples."""
    change = history.change()
    if change is None:
        return []
    rows = {
        side: {"value": mean["mean"], "bounds": None if mean["low"] is None else [mean["low"], mean["high"]]}
        for side, mean in (("before", change["first"]), ("after", change["last"]))
    }
    steps = counted(change["last"]["steps"], "step")
    return [{"name": f"training reward, first and last {steps}", **rows, "p_value": None}]


def _change(name: str, metrics: Columns) -> JsonObject | None:
    """Return a validation metric's first and last values, with their intervals and the p-value of the comparison."""
    steps = range(len(metrics.get(f"validation/{name}", [])))
    validated = [at for at in steps if _number(metrics, name, at) is not None]
    if not validated:
        return None
    first, last = validated[0], validated[-1]
    return {
        "name": name if "_" in name else f"greedy {name}",
        "before": _with_interval(metrics, name, first),
        "after": _with_interval(metrics, name, last) if last > first else None,
        "p_value": _number(metrics, f"{name}_p_start", last),
    }


def _with_interval(metrics: Columns, name: str, at: int) -> JsonObject:
    """Return a value with the ends of its 95% interval, from its own metrics or from its standard error."""
    value = _number(metrics, name, at)
    low, high, error = (_number(metrics, f"{name}_{end}", at) for end in ("low", "high", "stderr"))
    if value is not None and error is not None:
        low, high = value - 1.96 * error, value + 1.96 * error
    return {"value": value, "bounds": None if low is None or high is None else [low, high]}


def _number(metrics: Columns, name: str, at: int) -> float | None:
    """Return a metric of validation at an index of steps; None if it is missing or not finite."""
    value = metrics[f"validation/{name}"][at] if f"validation/{name}" in metrics else None
    return None if value is None or isinstance(value, str) else value


def _command(run: Path, recipe: JsonObject, is_complete: bool) -> str | None:
    """Return the command that uses the model or continues the run; None if it has kept no checkpoint."""
    folder = _at(recipe, "save", "folder")
    if not isinstance(folder, str) and not any((run / "checkpoints").glob("*")):
        return None
    return next_command(run, is_complete, folder if isinstance(folder, str) else None, recipe)


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []
