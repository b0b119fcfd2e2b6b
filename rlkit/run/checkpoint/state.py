"""What a run's next step depends on: the tensors and the numbers that a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from rlkit.errors import CheckpointError
from rlkit.models.store import CheckpointRef, Numbers
from rlkit.models.weights import trainable
from rlkit.train.run import Run, TrainableModule


def tensors(run: Run, known: Collection[str] | None = None) -> dict[str, Tensor]:
    """Return the run's tensors by name; they share its memory, so that loading into them loads the run.

    Frozen weights are left out, but for a reference that has moved: they come from the model's own files.

    Args:
        run: The run.
        known: Names in a checkpoint; the state of an optimizer that has stepped there is made here too.
    """
    found: dict[str, Tensor] = {}
    for name, trained in (("policy", run.trained), ("critic", run.critic)):
        if trained is not None:
            module = _inner(trained)
            parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
            found |= trainable(name, module)
            if known is not None and any(k.startswith(f"{name}/optimizer.") for k in known):
                _allocate(trained, parameters)
            found |= _optimizer_state(f"{name}/optimizer", trained, parameters)
    if run.average is not None:
        found |= {f"average.{i}": t for i, t in enumerate(run.average.tensors)}
    if run.recipe.reference is not None and run.reference is not None:
        found |= {f"reference.{n}": p.detach() for n, p in run.reference.actor.named_parameters()}
    return found


def numbers(run: Run) -> Numbers:
    """Return the run's numbers; data order, learning rates and sampled tokens follow from the seed and the step."""
    return Numbers(
        version=run.version,
        kl_coef=None if run.kl_penalty is None else run.kl_penalty.coef,
        shaper=None if run.shaper is None else (run.shaper.count, run.shaper.mean, run.shaper.squares),
    )


def restore(run: Run, found: CheckpointRef) -> None:
    """Set the run's numbers.

    Raises:
        CheckpointError: The checkpoint has not all of them.
    """
    kept = found.state.numbers
    for name, part, value in (("kl_coef", run.kl_penalty, kept.kl_coef), ("shaper", run.shaper, kept.shaper)):
        if part is not None and value is None:
            raise CheckpointError(f"{found.place} is damaged: its state has no {name}, which its recipe needs")
    run.version = kept.version
    if run.kl_penalty is not None and kept.kl_coef is not None:
        run.kl_penalty.coef = kept.kl_coef
    if run.shaper is not None and kept.shaper is not None:
        run.shaper.count, run.shaper.mean, run.shaper.squares = kept.shaper


def as_data(recipe_yaml: str) -> dict[str, Any]:
    """Return a recipe as JSON holds it: without the aliases of YAML, which can stand for more than fits in memory."""
    content: dict[str, Any] = json.loads(json.dumps(yaml.safe_load(recipe_yaml), default=str), parse_constant=str)
    return content


def _inner(trained: TrainableModule) -> nn.Module:
    """Return the module itself, whose names do not depend on how it is wrapped."""
    module: nn.Module = trained.module._original_module
    return module


def _allocate(trained: TrainableModule, parameters: Mapping[str, Tensor]) -> None:
    for parameter in parameters.values():
        trained.optimizer.optimizer.state[parameter] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(parameter),
            "exp_avg_sq": torch.zeros_like(parameter),
        }


def _optimizer_state(prefix: str, trained: TrainableModule, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    def all_of() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in parameters.items():
            for key, value in trained.optimizer.optimizer.state.get(parameter, {}).items():
                yield f"{prefix}.{name}.{key}", value

    return dict(all_of())
