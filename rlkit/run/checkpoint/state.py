"""What a run's next step depends on: the tensors and the numbers that a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import yaml
from torch import Tensor

from rlkit.errors import CheckpointError
from rlkit.models.checkpoint_schema import Numbers
from rlkit.models.checkpoints import CheckpointRef
from rlkit.models.weights import trainable
from rlkit.optimizers.trial import materialize_state
from rlkit.train.credit import RewardTransforms
from rlkit.train.models import TrainableModule
from rlkit.train.setup import TrainContext


def tensors(context: TrainContext, known: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the run's tensors by name; they share its memory, so that loading into them loads the run.

    Frozen weights are left out, but for a reference that has moved: they come from the model's own files.

    Args:
        context: The run's.
        known: Names in a checkpoint; the state of an optimizer that has stepped there is made here too.
    """
    found: dict[str, Tensor] = {}
    models = context.models
    both: list[tuple[str, TrainableModule[Any] | None]] = [("policy", models.policy), ("critic", models.critic)]
    for name, trained in both:
        if trained is not None:
            module = trained.inner
            parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
            found |= trainable(name, module)
            if known is not None:
                stepped = {k.rpartition(".")[0] for k in known}
                some = [p for n, p in parameters.items() if f"{name}/optimizer.{n}" in stepped]
                materialize_state(trained.optimizer.optimizer, some)
            found |= _optimizer_state(f"{name}/optimizer", trained, parameters)
    if models.average is not None:
        found |= {f"average.{i}": t for i, t in enumerate(models.average.tensors)}
    if context.recipe.reference is not None and models.reference is not None:
        found |= {f"reference.{n}": p.detach() for n, p in models.reference.actor.named_parameters()}
    if context.data.order.by_outcome is not None:
        found |= {f"order.{name}": tensor for name, tensor in context.data.order.by_outcome.tensors().items()}
    return found


def numbers(version: int, transforms: RewardTransforms) -> Numbers:
    """Return the run's numbers; data order, learning rates and sampled tokens follow from the seed and the step."""
    kl_penalty, shaper = transforms.kl_penalty, transforms.shaper
    return Numbers(
        version=version,
        kl_coef=None if kl_penalty is None else kl_penalty.coef,
        shaper=None if shaper is None else (shaper.count, shaper.mean, shaper.squares),
    )


def restore(transforms: RewardTransforms, found: CheckpointRef) -> None:
    """Set what changes rewards to the state of a checkpoint.

    Raises:
        CheckpointError: The checkpoint has not all of them.
    """
    kept, kl_penalty, shaper = found.state.numbers, transforms.kl_penalty, transforms.shaper
    for name, part, value in (("kl_coef", kl_penalty, kept.kl_coef), ("shaper", shaper, kept.shaper)):
        if part is not None and value is None:
            raise CheckpointError(f"{found.location} is damaged: its state has no {name}, which its recipe needs")
    if kl_penalty is not None and kept.kl_coef is not None:
        kl_penalty.coef = kept.kl_coef
    if shaper is not None and kept.shaper is not None:
        shaper.count, shaper.mean, shaper.squares = kept.shaper


def flat(section: object, prefix: str = "") -> dict[str, object]:
    """Return the values of a recipe by keys with dots; those that are null are left out."""
    if not isinstance(section, dict):
        return {} if section is None else {prefix: section}
    return {k: v for name, part in section.items() for k, v in flat(part, f"{prefix}.{name}".lstrip(".")).items()}


def as_data(recipe_yaml: str) -> dict[str, Any]:
    """Return a recipe as JSON holds it: without the aliases of YAML, which can stand for more than fits in memory."""
    content: dict[str, Any] = json.loads(json.dumps(yaml.safe_load(recipe_yaml), default=str), parse_constant=str)
    return content


def _optimizer_state(prefix: str, trained: TrainableModule[Any], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def all_of() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            for key, value in trained.optimizer.optimizer.state.get(parameter, {}).items():
                yield f"{prefix}.{name}.{key}", value

    return dict(all_of())
