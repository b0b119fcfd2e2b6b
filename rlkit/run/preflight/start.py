"""Checks at the start of a run, before the first step."""

from __future__ import annotations

from collections.abc import Callable

from rlkit.base.errors import RecipeError
from rlkit.rollout.template_check import check_template
from rlkit.run.preflight.adapter_check import check_adapters
from rlkit.run.preflight.plan import Trial, large_model, lines, require_reward, try_in_run
from rlkit.train.setup import TrainContext
from rlkit.train.teacher import check_servers


def preflight(context: TrainContext, note: Callable[[str], None], first: bool) -> None:
    """Show batch sizes, lengths and warnings; try the adapters, the reward and the teacher's servers.

    Args:
        context: The run's context; all ranks must call this.
        note: Function that shows a line.
        first: Whether this is rank 0, which tries the adapters and the reward.

    Raises:
        RecipeError: The adapters cannot be used, or the reward fails, and the recipe does not allow that; all ranks
            raise it.
        EngineError: A server of the teacher does not respond.
    """
    for line in lines(context.data, context.ranks.count):
        note(line)
    adapters: list[str] = []
    problem = None
    try:
        adapters += check_adapters(context.recipe.model) if first else ()
    except RecipeError as error:
        problem = error
    context.ranks.raise_any(problem)
    for line in adapters:
        note(line)
    for line in large_model(context.recipe, context.device.type == "cuda"):
        note(line)
    dialogue = context.data.dialogue
    for warning in (*check_template(dialogue.template).warnings, *dialogue.warnings):
        note(f"warning: {warning}")
    reward, service = context.recipe.trial_reward, context.service
    trial = Trial([])
    if first and reward is not None:
        trial = try_in_run(service, context.data, reward)
    trial = context.ranks.same(trial)
    require_reward(trial, context.recipe)
    for line in trial.lines:
        note(f"warning: {line}" if trial.failed else line)
    check_servers(context.data, context.service)
