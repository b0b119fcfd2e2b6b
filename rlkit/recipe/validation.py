"""Checks of what validation measures, and of metrics that a recipe names."""

from __future__ import annotations

import re
from collections.abc import Iterator

from rlkit.recipe.recipe import Recipe

VALIDATION_METRICS = (
    "accuracy", "accuracy_low", "accuracy_high", "finished_accuracy", "reward", "length", "stopped", "failed",
    "unscored",
)  # fmt: skip
"""What validation measures; the metrics of sampled answers have `sampled_` before the name. There are also `pass@K` and
`maj@K` of sampled ones, `accuracy/SOURCE` where the prompts have several sources, and `strict_accuracy` where the
reward has the component `strict`."""

PAIR_METRICS = ("accuracy", "accuracy_low", "accuracy_high", "margin")
"""What validation measures of a reward model, besides `accuracy/SOURCE`."""


def check_validation(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with the section `validation`."""
    validation = recipe.validation
    if validation is not None and not (validation.before or validation.every or validation.after):
        yield (
            "the section validation has before: false, every: 0 and after: false, so nothing is validated; set one of "
            "them, or validation: null"
        )
    if validation is not None and validation.tasks == {}:
        yield "validation.tasks names no task; add some, or set it to null for the recipe's own"
    if validation is not None:
        if validation.patience is not None and not validation.every:
            yield "validation.patience counts the validations of steps; set validation.every to 1 or more"
        yield from _check_metric(recipe, "validation.watch", validation.watch, validation.watch)


def check_best(recipe: Recipe) -> Iterator[str]:
    """Check the name of the metric; one that is not among a step's metrics is refused after the first step."""
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


def _check_metric(recipe: Recipe, option: str, given: str, name: str) -> Iterator[str]:
    """Check the name of a metric of validation, where the higher is the better."""
    known, start = name.removeprefix("sampled_"), given.removesuffix(name)
    if not recipe.generates:
        if name not in PAIR_METRICS and not re.match(r"accuracy/.", name):
            listed = ", ".join(f"{start}{metric}" for metric in PAIR_METRICS)
            yield f"{option} is {given!r}, expected one of {listed} (or {start}accuracy/SOURCE)"
        return
    if known not in VALIDATION_METRICS and not re.match(r"accuracy/.|strict_accuracy$|(pass|maj)@[0-9]+$", known):
        listed = ", ".join(f"{start}{metric}" for metric in VALIDATION_METRICS)
        yield (
            f"{option} is {given!r}, expected one of {listed} (or {start}sampled_..., {start}sampled_pass@K, "
            f"{start}accuracy/SOURCE)"
        )
    elif name.startswith("sampled_") and recipe.validation is not None and not recipe.validation.samples:
        yield f"{option} is {given!r}, but validation.samples is 0; set it to 1 or more"
