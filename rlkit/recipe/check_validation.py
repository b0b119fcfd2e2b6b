"""Checks of validation, and of the metrics that a recipe names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlkit.recipe.recipe import Recipe

VALIDATION_METRICS = (
    "accuracy", "accuracy_low", "accuracy_high", "finished_accuracy", "reward", "length", "stopped", "failed",
    "unscored",
)  # fmt: skip
"""The metrics of validation; those of sampled completions have the prefix `sampled_`, and there are also `pass@K` and
`maj@K`. Prompts of several sources add `accuracy/SOURCE`, components of the reward `reward/COMPONENT`, but `strict`
`strict_accuracy`."""

PAIR_METRICS = ("accuracy", "accuracy_low", "accuracy_high", "margin")
"""The metrics of a reward model's validation, besides `accuracy/SOURCE`."""


def check_validation(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the section `validation`."""
    validation = recipe.validation
    if validation is not None and not (validation.before or validation.every or validation.after):
        yield (
            "the section validation has before: false, every: 0 and after: false, so nothing is validated; set one of "
            "them, or validation: null"
        )
    if validation is not None and validation.tasks == {}:
        yield "validation.tasks names no task; add one, or set it to null for the recipe's task"
    if validation is not None:
        if validation.patience is not None and not validation.every:
            yield "validation.patience counts the validations of steps; set validation.every to 1 or more"
        if validation.patience is not None or not recipe.measures_losses_alone:
            yield from _check_metric(recipe, "validation.watch", validation.watch, validation.watch)


def check_best(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of `save.keep_best`; a metric that no step has is refused after the first step."""
    key, validation = recipe.save.keep_best, recipe.validation
    if key is None:
        return
    kind, _, name = key.partition("/")
    if kind == "validation" and name:
        problems = list(_check_metric(recipe, "save.keep_best", key, name))
        if not problems and (validation is None or not validation.every):
            problems = [f"save.keep_best is {key!r}, but no step validates; set validation.every to 1 or more"]
        yield from problems
    elif not key.isprintable() or not (name or key == "accuracy"):
        yield f"save.keep_best is {key!r}, expected a metric of metrics.jsonl, such as validation/accuracy"


def _check_metric(recipe: Recipe, option: str, metric: str, name: str) -> Iterator[str]:
    """Yield a problem if a name is no metric of validation that can be best."""
    base_name = name.removeprefix("sampled_")
    prefix = metric.removesuffix(name)
    if name in recipe.method.validation_metrics:
        return
    if recipe.measures_losses_alone:
        yield f"{option} is {metric!r}, but without a `reward:` validation scores nothing; set it to {prefix}loss"
        return
    if recipe.model.scores:
        if name not in PAIR_METRICS and not re.match(r"accuracy/.", name):
            listed = ", ".join(f"{prefix}{known_name}" for known_name in PAIR_METRICS)
            yield f"{option} is {metric!r}, expected one of {listed} (or {prefix}accuracy/SOURCE)"
        return
    if base_name not in VALIDATION_METRICS and not re.match(
        r"(accuracy|reward)/.|strict_accuracy$|(pass|maj)@[0-9]+$", base_name
    ):
        listed = ", ".join(f"{prefix}{known_name}" for known_name in VALIDATION_METRICS)
        yield (
            f"{option} is {metric!r}, expected one of {listed} (or {prefix}sampled_..., {prefix}sampled_pass@K, "
            f"{prefix}accuracy/SOURCE, {prefix}reward/COMPONENT)"
        )
    elif name.startswith("sampled_") and recipe.validation is not None and not recipe.validation.samples:
        yield f"{option} is {metric!r}, but validation.samples is 0; set it to 1 or more"
