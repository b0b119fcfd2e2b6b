"""The state of a run that a checkpoint holds: its tensors and numbers."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from rlkit.base.errors import CheckpointError
from rlkit.interfaces.placement import PlacedModel
from rlkit.models.checkpoint_schema import Numbers
from rlkit.models.checkpoints import CheckpointRef
from rlkit.models.reference import Reference
from rlkit.train.credit import RewardTransforms
from rlkit.train.setup import TrainContext


def tensors(context: TrainContext, saved_names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the run's tensors by name; they share its memory, so that loading into them loads the run.

    Frozen weights are left out, except those of a reference that has moved: they come from the model's own files.

    Args:
        context: The run's context.
        saved_names: Names of the tensors in a checkpoint to load, whose optimizer state is also created here; None for
            those to save, which have optimizer state if the recipe's `save.optimizer` is true.
    """
    models = context.models
    state: dict[str, Tensor] = {}
    for name, module in models.trained.items():
        state |= module.tensors(name, saved_names, optimizer=context.recipe.save.optimizer)
    if isinstance(models.critic, PlacedModel) and saved_names is None:  # loaded by its pool
        state |= models.critic.ask("state")().tensors
    if models.average is not None:
        state |= {f"average.{i}": tensor for i, tensor in enumerate(models.average.tensors)}
    if context.recipe.reference is not None and isinstance(models.reference, Reference):
        state |= {f"reference.{name}": p.detach() for name, p in models.reference.actor.named_parameters()}
    order = context.data.order.by_outcome
    if order is not None:
        state |= {f"order.{name}": tensor for name, tensor in order.tensors().items()}
    return state


def numbers(version: int, transforms: RewardTransforms, advantage: Mapping[str, float] | None = None) -> Numbers:
    """Return the run's numbers; data order, learning rates and sampled tokens follow from the seed and the step."""
    kl_penalty, shaper = transforms.kl_penalty, transforms.shaper
    return Numbers(
        version=version,
        advantage=dict(advantage or {}),
        kl_coef=None if kl_penalty is None else kl_penalty.coef,
        shaper=None if shaper is None else (shaper.count, shaper.mean, shaper.squares),
    )


def restore(transforms: RewardTransforms, checkpoint: CheckpointRef) -> None:
    """Set the reward transforms to the state of a checkpoint.

    Raises:
        CheckpointError: The checkpoint lacks the state of a transform.
    """
    saved = checkpoint.state.numbers
    kl_penalty, shaper = transforms.kl_penalty, transforms.shaper
    for name, transform, value in (("kl_coef", kl_penalty, saved.kl_coef), ("shaper", shaper, saved.shaper)):
        if transform is not None and value is None:
            raise CheckpointError(f"{checkpoint.location} is damaged: its state has no {name}, which its recipe needs")
    if kl_penalty is not None and saved.kl_coef is not None:
        kl_penalty.coef = saved.kl_coef
    if shaper is not None and saved.shaper is not None:
        shaper.count, shaper.mean, shaper.squares = saved.shaper
