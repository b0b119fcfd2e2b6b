"""Rows without a prompt, and prompts whose completions the reward cannot score: found before a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rlkit.base.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe.recipe import Recipe
from rlkit.recipe.rollout import sampling_of_row
from rlkit.registry import calling, require
from rlkit.types import Prompt

SHOWN = 3
"""The number of prompts that a message names."""


class Scorable(NamedTuple):
    """The prompts that a run can use.

    Args:
        training: Indices of training prompts.
        validation: Validation prompts.
        summary: What is left out, in words; empty if nothing is.
    """

    training: list[int]
    validation: list[Prompt]
    summary: str


def select_scorable(
    recipe: Recipe, rows: Sequence[int], prompts: Sequence[Prompt], validation: Sequence[Prompt]
) -> Scorable:
    """Return the prompts that the reward can score.

    Args:
        recipe: The run's recipe.
        rows: Indices of the training rows.
        prompts: The prompts of these rows.
        validation: The validation prompts.

    Raises:
        RecipeError: Some prompts cannot be scored and `rollout.unscorable` does not drop them, or none can be scored;
            or a row has no prompt to sample from.
    """
    located = [*zip(map("training row {}".format, rows), prompts, strict=True)]
    located += [(f"validation row {i}", prompt) for i, prompt in enumerate(validation)]
    _require_prompts(recipe, located)
    _require_sampling(recipe, located)
    for location, prompt in located:
        reason = None if recipe.agent is None else recipe.agent.refuses(prompt)
        if reason is not None:
            raise RecipeError(f"{location}: {reason}")
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
            f"{selected.summary}; correct these rows, choose another reward, or leave them out with "
            "rollout.unscorable: drop"
        )
    if not selected.training or len(selected.validation) < bool(validation):
        raise RecipeError(f"{selected.summary}, so no prompt is left; choose another reward, or another answer column")
    return selected


def _require_prompts(recipe: Recipe, prompts: Sequence[tuple[str, Prompt]]) -> None:
    """Refuse plain texts, which are recorded completions without a prompt, where an engine samples.

    Raises:
        RecipeError: A row is a plain text.
    """
    if not recipe.method.samples or recipe.environment is not None:
        return
    for location, prompt in prompts:
        if prompt.recorded and not prompt.messages:
            field = getattr(recipe.task, "prompt_field", "prompt")
            listed = ", ".join(map(str, prompt.meta)) or "nothing"
            raise RecipeError(f"{location}: no field {field!r} (task.prompt_field); the row has: {listed}")


def _require_sampling(recipe: Recipe, prompts: Sequence[tuple[str, Prompt]]) -> None:
    """Check the rows' own options of sampling.

    Raises:
        RecipeError: A row has others than it may have.
    """
    column = recipe.rollout.sampling_column
    for location, prompt in prompts if column is not None else ():
        try:
            sampling_of_row(recipe.rollout.sampling, prompt.meta.get(str(column)))
        except ValueError as error:
            raise RecipeError(f"{location}: {error}") from error


def unscorable_training(recipe: Recipe, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the indices of training prompts that the reward cannot score, with reasons; none if all are recorded."""
    return _unscorable(recipe.method.training_reward(recipe), prompts)


def unscorable_validation(recipe: Recipe, prompts: Sequence[Prompt]) -> dict[int, str]:
    """Return the indices of validation prompts that the reward cannot score, with reasons."""
    return {} if recipe.model.scores else _unscorable(recipe.reward, prompts)


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
    """Return the number and share of prompts that cannot be scored, and the first of them; empty if there are none."""
    if not reasons:
        return ""
    more = f"; and {len(reasons) - SHOWN:,} others" if len(reasons) > SHOWN else ""
    share = f"{len(reasons):,} of {prompts:,} prompts ({len(reasons) / prompts:.2%})"
    return f"the reward cannot score {share}: {'; '.join(reasons[:SHOWN])}{more}"
