"""A recipe's policy without training: its chat template, conversations with it, and its validation.

    data, fabric = load_data(recipe), fabric_for(recipe)
    fabric.launch()
    evaluation = validate_policy(recipe, data, fabric)

All ranks of a launched Fabric run the same lines; `fabric.is_global_zero` is the one that prints.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rlkit.data.data import Data
from rlkit.models.load import load_tokenizer, stop_ids
from rlkit.recipe import Model, Recipe
from rlkit.rollout.collect import collect
from rlkit.rollout.loop import warn_on_stderr
from rlkit.rollout.service import RolloutService
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.template_check import check_template
from rlkit.run.evaluate import Evaluation, evaluate, samplings
from rlkit.run.method import procedure_of
from rlkit.train.sampling import score_group
from rlkit.train.setup import Bound, bound_without_policy, fabric_for, prepare_rollouts, prepare_training
from rlkit.types import Prompt, Trajectory

if TYPE_CHECKING:
    from lightning.fabric import Fabric

__all__ = [
    "Bound", "ChatTemplate", "Evaluation", "bound_without_policy", "chat_template", "check_template", "fabric_for",
    "sample", "sampling_service", "samplings", "validate", "validate_policy",
]  # fmt: skip


def chat_template(model: Model) -> ChatTemplate:
    """Return the chat template of a model, without tools.

    Raises:
        RecipeError: The tokenizer cannot be loaded, or has no template that conversations can be rendered with.
    """
    tokenizer = load_tokenizer(model)
    return ChatTemplate(tokenizer, stop_ids(model, tokenizer), kwargs=model.chat_template_kwargs)


@contextmanager
def sampling_service(recipe: Recipe, data: Data, fabric: Fabric) -> Iterator[RolloutService]:
    """Load the policy and its engine, with equal weights, and close them at the end; all ranks must call this.

    Args:
        recipe: Checked.
        data: Loaded for the recipe.
        fabric: Launched.
    """
    with closing(prepare_rollouts(recipe, data, fabric)) as service:
        service.sync_weights()
        yield service


def sample(
    service: RolloutService, prompts: Sequence[tuple[int, Prompt]], samples: int = 1, *, scored: bool = False
) -> list[Trajectory]:
    """Hold conversations with the policy, as in the first step of a run; return them by prompt.

    Args:
        service: Of this rank.
        prompts: Those of this rank, with their numbers.
        samples: Conversations of each prompt.
        scored: Whether the recipe's reward scores them.
    """
    setup = service.conversation_setup(service.recipe.rollout.sampling, samples, step=0)
    return service.sample(collect(setup, prompts, partial(score_group, service) if scored else _unscored))


async def _unscored(group: Sequence[Trajectory]) -> None:
    """Leave the group without scores."""


def validate(service: RolloutService, prompts: Sequence[Prompt]) -> Evaluation:
    """Answer and score prompts as a run validates, or score their recorded answers with a reward model.

    All ranks must call this. `Evaluation.metrics` are of all ranks, `Evaluation.answers` of this one.
    """
    return procedure_of(service.recipe).evaluate(service, prompts)


def validate_policy(recipe: Recipe, data: Data, fabric: Fabric, initial: Model | None = None) -> Evaluation:
    """Load a policy and validate it as a run does: of recorded completions the loss is measured, too.

    All ranks must call this.

    Args:
        recipe: Checked.
        data: Loaded for the recipe.
        fabric: Launched.
        initial: The policy with which its run began, which losses may compare it with; None if it is that itself.
    """
    procedure = procedure_of(recipe)
    if procedure.losses is None:  # agreed: from the recipe
        with sampling_service(recipe, data, fabric) as service:
            return validate(service, data.validation)
    context = prepare_training(recipe, data, fabric, warn_on_stderr, initial=initial)
    with closing(context.service):
        context.service.sync_weights()
        return evaluate(context, procedure)
