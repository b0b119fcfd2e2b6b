"""reasoning-gym's data sets: made by name and options, and answers that its scorers would run as code."""

from __future__ import annotations

import ast
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from rlkit.base.errors import RecipeError, explain
from rlkit_env_gym.packages import require_supported, suggestion

HASH_SEEDED = frozenset({"isomorphic_strings", "polynomial_multiplication", "ransom_note", "word_ladder"})
"""Data sets whose rows depend on Python's hash seed, since they iterate over sets of texts."""
EVALUATED = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Data sets whose scorers call `eval` on answers that state a list."""
PARSED = frozenset(
    {"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"}
)
"""Data sets whose scorers call sympy's `parse_expr` on answers, which evaluates them as Python."""
FUNCTIONS = frozenset(
    {"Abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "cot", "coth", "csc", "erf", "exp", "ln"}
    | {"log", "pi", "sec", "sin", "sinh", "sqrt", "tan", "tanh"}
)
"""What an answer to a `PARSED` data set may name, besides single letters."""
FORMULA = re.compile(r"[0-9A-Za-z_+*/^().,\s-]*")
NAME = re.compile(r"[A-Za-z_]\w*")
ATTRIBUTE = re.compile(r"\.\s*[A-Za-z_]|[\w)]\s*\.\s*\(|\)\s*\.")


def require_generator(name: str) -> None:
    """Check that reasoning-gym has a data set.

    Raises:
        RecipeError: It does not, or its rows would not be reproducible.
    """
    require_supported("reasoning-gym")
    from reasoning_gym.factory import DATASETS  # type: ignore[import-untyped]

    if name not in DATASETS or name == "composite":
        hint = suggestion(name, DATASETS.keys() - {"composite"})
        raise RecipeError(f"reasoning-gym has no data set {name!r}; {hint}")
    if name in HASH_SEEDED and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise RecipeError(
            f"the rows of reasoning-gym's {name!r} depend on Python's hash seed, which is random in each process; "
            "set the environment variable PYTHONHASHSEED=0"
        )


def make_generator(name: str, seed: int, size: int, config: Mapping[str, Any]) -> Any:
    """Return a data set of reasoning-gym.

    Raises:
        RecipeError: It refuses its configuration.
    """
    import reasoning_gym  # type: ignore[import-untyped]

    try:
        return reasoning_gym.create_dataset(name, **{**config, "seed": seed, "size": size})
    except Exception as error:  # its validation is made of assertions
        raise RecipeError(
            f"reasoning-gym refuses the config {dict(config)} of {name!r}: {explain(error)}; its configuration class "
            "lists the options"
        ) from error


def make_composite(weights: Mapping[str, float], seed: int, size: int, configs: Mapping[str, Any]) -> Any:
    """Return reasoning-gym's mixture of several data sets."""
    from reasoning_gym.composite import DatasetSpec  # type: ignore[import-untyped]

    specs = [DatasetSpec(name, weight, dict(configs.get(name, {}))) for name, weight in weights.items()]
    return make_generator("composite", seed, size, {"datasets": specs})


@lru_cache(64)
def scorer(name: str, config: str) -> Any:
    """Return a data set whose `score_answer` evaluates no code; its configuration is JSON."""
    dataset = make_generator(name, 0, 1, json.loads(config))
    if name in EVALUATED:
        module: Any = sys.modules[type(dataset).__module__]
        module.eval = ast.literal_eval  # found before the builtin
    return dataset


def is_formula(answer: str) -> bool:
    """Whether an answer holds numbers, single letters, known functions and operators alone, but no attribute."""
    if FORMULA.fullmatch(answer) is None or ATTRIBUTE.search(answer):
        return False
    return all(len(name) == 1 or name in FUNCTIONS for name in NAME.findall(answer))


def names_of(datasets: str | Mapping[str, float]) -> Sequence[str]:
    """Return the names of a task's data sets."""
    return [datasets] if isinstance(datasets, str) else list(datasets)
