"""Prompts to which no answer can be scored: identified by the reward before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlkit.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.types import Prompt

SHOWN = 3
"""Prompts that are named in a message."""


class Scorable(NamedTuple):
    """The prompts that a run can use: indices of training prompts, validation prompts, and what is left out."""

    training: list[int]
    validation: list[Prompt]
    left_out: str


def select_scorable(
    recipe: Recipe, rows: Sequence[int], prompts: Sequence[Prompt], validation: Sequence[Prompt]
) -> Scorable:
    """Return the prompts that the reward can score.

    Args:
        recipe: The run's.
        rows: The numbers of the training rows.
        prompts: Their prompts.
        validation: The validation prompts.

    Raises:
        RecipeError: It cannot score some, and `rollout.unscorable` does not drop them; or it can score none.
    """
    training = unscorable_training(recipe, prompts)
    held_out = unscorable_validation(recipe, validation)
    reasons = [
        f"training row {rows[index]} {reason}"
        for index, reason in sorted(training.items(), key=lambda item: rows[item[0]])
    ]
    reasons += [f"validation row {index} {reason}" for index, reason in held_out.items()]
    selected = Scorable(
        [index for index in range(len(prompts)) if index not in training],
        [prompt for index, prompt in enumerate(validation) if index not in held_out],
        _summary(reasons, len(prompts) + len(validation)),
    )
    if reasons and recipe.rollout.unscorable == "error":
        raise RecipeError(
            f"{selected.left_out}; correct these rows, choose another reward, or leave them out with "
            "rollout.unscorable: drop"
        )
    if not selected.training or len(selected.validation) < bool(validation):
        raise RecipeError(f"{selected.left_out}, so that none is left; choose another reward, or another answer column")
    return selected


def unscorable_training(recipe: Recipe, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the indices of training prompts that the reward cannot score, with reasons; recorded answers need none."""
    return {} if recipe.rollout.engine.recorded else _unscorable(recipe.reward, prompts)


def unscorable_validation(recipe: Recipe, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the indices of validation prompts that the reward cannot score, with reasons."""
    return _unscorable(recipe.reward, prompts) if recipe.generates else {}


def _unscorable(reward: RewardManager | None, prompts: Sequence[Prompt]) -> dict[int, str]:
    reasons: dict[int, str] = {}
    if reward is None or type(reward).unscorable is RewardManager.unscorable:
        return reasons
    for index, prompt in enumerate(prompts):
        with calling(reward, "unscorable"):
            reason = reward.unscorable(prompt)
        require(reward, "unscorable", outputs.of_unscorable(reason))
        if reason is not None:
            reasons[index] = reason if prompt.id.isdecimal() else f"(prompt {prompt.id!r}) {reason}"
    return reasons


def _summary(reasons: Sequence[str], prompts: int) -> str:
    """Return the number of prompts that cannot be scored, their share, and the first of them; nothing without any."""
    if not reasons:
        return ""
    more = f"; and {len(reasons) - SHOWN:,} others" if len(reasons) > SHOWN else ""
    share = f"{len(reasons):,} of {prompts:,} prompts ({len(reasons) / prompts:.2%})"
    return f"the reward cannot score {share}: {'; '.join(reasons[:SHOWN])}{more}"
