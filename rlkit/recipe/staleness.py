"""Checks of rollouts that run ahead of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.interfaces.loss import Inputs, SequenceLoss
from rlkit.recipe.recipe import Recipe


def check_staleness(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each option that does not fit `rollout.max_staleness`."""
    rollout, name = recipe.rollout, "rollout.max_staleness"
    if not rollout.max_staleness:
        if rollout.lead:
            yield f"rollout.lead is {rollout.lead:g}, but {name} is 0; set {name} to 1 or more, or remove rollout.lead"
        if rollout.replay is not None:
            yield f"rollout.replay trains on groups of earlier steps, but {name} is 0; set {name} to 1 or more"
        return
    stale = f"{name} is {rollout.max_staleness}, but"
    if rollout.lead is not None and rollout.lead > rollout.max_staleness:
        yield f"rollout.lead is {rollout.lead:g}, expected at most {name}, which is {rollout.max_staleness}"
    ratio = recipe.train.old_logps != "recompute" and Inputs.OLD_LOGPS in recipe.loss.inputs
    any_samples = (
        isinstance(recipe.loss, SequenceLoss) or recipe.loss.forward.teacher_top
    )  # losses per sequence, and of distributions
    if recipe.correction is None and recipe.rejection is None and not ratio and not any_samples:
        yield (
            f"{stale} nothing corrects for tokens of older weights: set train.old_logps: rollout (the loss clips the "
            "ratio of the current weights to those that sampled; only for losses with ratios) or loglinear (A-3PO), "
            "or add correction: {high: 2.0} (weighs each token by that ratio) or rejection: {high: 2.0} (leaves out "
            "the tokens with the largest ratios)"
        )
    if not (rollout.engine.interruptible or rollout.engine.beside):
        yield (
            f"{stale} rollout.engine {type(rollout.engine).__name__} cannot be interrupted, and does not sample "
            "during training; choose TorchEngine"
        )
    if rollout.max_conversations is not None and not rollout.engine.beside:
        yield f"{stale} rollout.max_conversations does not limit interrupted conversations; set rollout.lead instead"
    if rollout.oversample > 1:
        yield (
            f"{stale} rollout.oversample is {rollout.oversample}, although no step waits for its slowest groups: they "
            "continue in the next one; set rollout.oversample to 1"
        )
    if recipe.curriculum is not None:
        yield (
            f"{stale} curriculum {type(recipe.curriculum).__name__} orders prompts by the outcomes of all "
            f"previous steps, which are unknown when prompts start ahead; remove it, or set {name} to 0"
        )
