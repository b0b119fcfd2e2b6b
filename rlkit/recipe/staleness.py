"""Checks of rollouts that run ahead of the trainer."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.interfaces.loss import Inputs, SequenceLoss
from rlkit.recipe.recipe import Recipe


def check_staleness(recipe: Recipe) -> Iterator[str]:
    """Yield what does not go with `rollout.max_staleness`."""
    rollout, name = recipe.rollout, "rollout.max_staleness"
    if not rollout.max_staleness:
        if rollout.lead:
            yield f"rollout.lead is {rollout.lead:g}, but {name} is 0; set {name} to 1 or more, or remove rollout.lead"
        if rollout.replay is not None:
            yield f"rollout.replay trains on groups of earlier steps, but {name} is 0; set {name} to 1 or more"
        return
    given = f"{name} is {rollout.max_staleness}, but"
    if rollout.lead is not None and rollout.lead > rollout.max_staleness:
        yield f"rollout.lead is {rollout.lead:g}, expected at most {name}, which is {rollout.max_staleness}"
    ratio = recipe.train.old_logps != "recompute" and (Inputs.OLD_LOGPS in recipe.loss.inputs)
    # losses of sequences and of distributions may have any samples
    any_samples = isinstance(recipe.loss, SequenceLoss) or recipe.loss.forward.teacher_top
    if recipe.correction is None and recipe.rejection is None and not ratio and not any_samples:
        yield (
            f"{given} nothing corrects for tokens of older weights: set train.old_logps: rollout (the loss clips the "
            "ratio of the weights that learn to those that sampled; only with losses of ratios) or loglinear (A-3PO), "
            "or add correction: {high: 2.0} (weighs each token by that ratio) or rejection: {high: 2.0} (leaves out "
            "the worst)"
        )
    if not (rollout.engine.interruptible or rollout.engine.beside):
        yield (
            f"{given} rollout.engine {type(rollout.engine).__name__} cannot be interrupted, nor does it sample while "
            "the trainer learns; choose TorchEngine"
        )
    if rollout.max_conversations is not None and not rollout.engine.beside:
        yield f"{given} rollout.max_conversations does not bound those that are interrupted; set rollout.lead instead"
    if rollout.oversample > 1:
        yield (
            f"{given} rollout.oversample is {rollout.oversample}, though no step waits for its slowest groups already: "
            "they go on in the next one; set rollout.oversample to 1"
        )
    if recipe.curriculum is not None:
        yield (
            f"{given} curriculum {type(recipe.curriculum).__name__} orders prompts by the outcomes of all steps "
            f"before, which are not known when prompts begin ahead; remove it, or set {name} to 0"
        )
