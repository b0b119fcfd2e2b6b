"""The verdict on a run by its validations, and the command that comes next."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rlkit.recipe.trust import risk
from rlkit.types import JsonObject

Metrics = dict[str, float]
SMALLEST_P = 1 / 4001
"""The least p-value of a resampling test, with 4,000 resamples: the true one may be smaller."""
SIGNIFICANT = 0.05
"""The largest p-value of a change that is no chance."""
VERDICT_METRICS = ("accuracy", "sampled_accuracy", "reward", "sampled_reward")
"""Metrics that a verdict may be on; it is on the first that both validations have."""


Change = Literal["improved", "unchanged", "worse"]
CHANGES: tuple[str, ...] = get_args(Change)


@dataclass(frozen=True)
class Verdict:
    """How validation accuracy has changed in a run, or the reward of validation if it gives no accuracy.

    Args:
        metric: `accuracy` or `reward` of greedy completions; `sampled_accuracy` or `sampled_reward` without these.
        before: Its value before training.
        after: Its value after training.
        p_value: Of the paired comparison of the two.
        change: `unchanged` if the p-value exceeds 0.05.
    """

    metric: str
    before: float
    after: float
    p_value: float
    change: Change

    def __str__(self) -> str:
        kind, _, metric = self.metric.rpartition("_")
        values = f"{self.before:.3f} -> {self.after:.3f} (p-value {p_text(self.p_value)})"
        return f"{self.change}: {kind or 'greedy'} {metric} {values}"


def merit(metric: str, value: float) -> float:
    """Return a metric's value as a number of which higher is better: a loss changes its sign."""
    return -value if metric.rpartition("/")[2] == "loss" else value


def p_text(p_value: float) -> str:
    """Return a p-value as text: an upper bound if a resampling test cannot give a smaller one."""
    return "< 0.0003" if p_value == SMALLEST_P else f"{p_value:.2g}"


def verdict_on(before: Metrics | None, after: Metrics | None) -> Verdict | None:
    """Return the change of accuracy or reward between two validations; None if they cannot be compared."""
    for metric in VERDICT_METRICS:
        if before is None or after is None or not {metric, f"{metric}_p_start"} <= after.keys() or metric not in before:
            continue
        p_value = after[f"{metric}_p_start"]
        is_significant = p_value <= SIGNIFICANT and after[metric] != before[metric]
        change: Change = "improved" if after[metric] > before[metric] else "worse"
        return Verdict(metric, before[metric], after[metric], p_value, change if is_significant else "unchanged")
    return None


def next_command(run: Path, is_complete: bool, save_folder: str | None, recipe: JsonObject) -> str:
    """Return the command that exports the model of a complete run, or continues another one.

    Args:
        run: The run folder.
        is_complete: Whether the run has made all its steps.
        save_folder: The folder of its checkpoints; None if they are in the run folder.
        recipe: The run's recipe as data.
    """
    path = shlex.quote(str(run))
    if is_complete:
        return f"rlkit export --checkpoint {path} --out MODEL"
    if save_folder is None:
        return f"rlkit fit --resume {path}{' --allow-code' * (risk(recipe) is not None)}"
    options = f"--out {path} --resume auto --save.folder {shlex.quote(save_folder)}"
    return f"rlkit fit --recipe {path}/recipe.yaml {options}"
