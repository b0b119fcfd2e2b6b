"""The models of a run on this rank: placed on its device, sharded where the strategy shards, with their optimizers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Generic, TypeVar

import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from rlkit.base.errors import RecipeError
from rlkit.distributed.activations import ActivationOffload
from rlkit.distributed.fsdp2 import FSDP2Strategy, accumulating, checkpoint_activations, clip
from rlkit.distributed.offload import HostOffload
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.placement import PlacedModel, Pools
from rlkit.models.actor import Actor, ScoreModel, ValueModel
from rlkit.models.config import naming
from rlkit.models.flops import LearningWork
from rlkit.models.load import load_backbone, load_policy
from rlkit.models.lora import base_model, frozen_weights, share_frozen
from rlkit.models.optimizer_state import materialize_state
from rlkit.models.reference import AveragedPolicy, FrozenPolicy, Reference, WeightAverage
from rlkit.models.vision import backbone_of
from rlkit.models.weights import trainable
from rlkit.recipe import Critic, Model, Recipe, Teacher, Train
from rlkit.train.optim import make_optimizer

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class TrainableModule(Generic[M]):
    """A module that is trained, with its optimizer.

    Args:
        inner: The module itself, whose parameter names do not depend on the strategy.
        module: The same as Fabric wraps it: what the forward and backward passes go through.
        optimizer: As Fabric wraps it.
        max_grad_norm: What its gradients are clipped to.
        fabric: The launched Fabric.
        ranks: Ranks over whose gradients the strategy takes the mean: data- and sequence-parallel ones.
    """

    inner: M
    module: nn.Module
    optimizer: Any
    max_grad_norm: float
    fabric: Fabric
    ranks: int

    def accumulating(self, more: bool) -> AbstractContextManager[None]:
        """Return the context of a pass; ranks exchange gradients in the last one, after which no `more` follow."""
        return accumulating(self.fabric, self.module, more)

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this rank's share of a loss: the gradients of all ranks add up."""
        self.fabric.backward(loss * self.ranks)

    def clip_gradients(self) -> Tensor:
        """Clip the gradient over all ranks; return its norm before, which may not be finite."""
        return clip(self.fabric, self.module, self.optimizer, self.max_grad_norm)

    def flops(self, lengths: Tensor, chosen: int) -> float | None:
        """Return the operations to learn from rows of these lengths [B]; see `LearningWork`."""
        return None if self._work is None else self._work.flops(lengths, chosen)

    def tensors(self, name: str, saved_names: Collection[str] | None = None, *, optimizer: bool) -> dict[str, Tensor]:
        """Return the trained weights and the state of the optimizer by their names in checkpoints; they share memory.

        Args:
            name: The module's.
            saved_names: Names of the tensors in a checkpoint to load, whose optimizer state is also created here; None
                for those to save.
            optimizer: Whether the optimizer's state is saved.
        """
        state = trainable(name, self.inner)
        if saved_names is None and not optimizer:
            return state
        parameters = {key: parameter for key, parameter in self.inner.named_parameters() if parameter.requires_grad}
        if saved_names is not None:
            saved_parameters = {saved.rpartition(".")[0] for saved in saved_names}
            stepped = [p for key, p in parameters.items() if f"{name}/optimizer.{key}" in saved_parameters]
            materialize_state(self.optimizer.optimizer, stepped)
        for key, parameter in parameters.items():
            for field, value in self.optimizer.optimizer.state.get(parameter, {}).items():
                state[f"{name}/optimizer.{key}.{field}"] = value
        return state

    @cached_property
    def _work(self) -> LearningWork | None:
        wrapped = self.inner.policy if isinstance(self.inner, Actor) else self.inner.backbone
        return LearningWork.of(base_model(wrapped))  # type: ignore[arg-type]


class Placer:
    """Puts modules on this rank's device, sharded where the strategy shards; all ranks must call its methods.

    Args:
        fabric: Launched.
        ranks: This rank among the others.
    """

    def __init__(self, fabric: Fabric, ranks: Ranks) -> None:
        self.fabric = fabric
        self.ranks = ranks
        self.sharded = isinstance(fabric.strategy, FSDP2Strategy)
        self.empty = self.sharded and fabric.global_rank > 0
        """Whether this rank loads modules without weights, which sharding brings from the first rank."""

    def trainable(self, module: M, section: Train | Critic, train: Train) -> TrainableModule[M]:
        """Place a module that is trained and make its optimizer; activations are kept as `train` says."""
        if train.checkpoint_activations:
            checkpoint_activations(module)
        if train.offload_activations:
            ActivationOffload(module, self.fabric.device, self.ranks.tensor_parallel)
        wrapped = self.set_up(module)
        optimizer = self.fabric.setup_optimizers(make_optimizer(module, section))
        averaged = self.ranks.count * self.ranks.sequence_parallel
        return TrainableModule(module, wrapped, optimizer, section.max_grad_norm, self.fabric, averaged)

    def frozen(self, module: nn.Module) -> None:
        """Place a module that is not trained."""
        if self.sharded:
            self.set_up(module)
        else:
            module.to(self.fabric.device)
            self._check(module)

    def set_up(self, module: nn.Module) -> nn.Module:
        """Let Fabric place and wrap a module."""
        wrapped: nn.Module = self.fabric.setup_module(module)
        self._check(module)
        return wrapped

    @torch.no_grad()
    def _check(self, module: nn.Module) -> None:
        """Check again, where the weights are now, how a module is computed; all ranks compute it alike."""
        if self.sharded:
            if isinstance(module, Actor):
                module.chunked = self.ranks.any(module.chunked)  # only the first rank had weights to probe
            tokens = torch.zeros(1, 2, dtype=torch.long, device=self.fabric.device)
            module(tokens, tokens.bool())  # FSDP finds its root before an inner module is called
        if isinstance(module, Actor | ValueModel):
            module.passes.sequence = self.ranks.sequence
            if self.sharded or self.fabric.device.type != "cpu":
                with self.fabric.autocast():
                    module.check_passes(self.fabric.device)
            problem = module.passes.division_problem
            indivisible = "fabric.strategy has sequence_parallel, but the tokens of a model cannot be divided"
            self.ranks.raise_any(None if problem is None else RecipeError(f"{indivisible}: {problem}; set it to 1"))
            if not self.ranks.all(module.passes.packed):
                module.passes.packed = False
                module.passes.reason = module.passes.reason or "passes of another rank cannot be packed"


class Models:
    """The policy, and the critic, the reference, the teachers and the averaged weights where the recipe has them.

    Args:
        recipe: Checked.
        placer: Of this rank.
        pools: Have the models that the recipe places; None if it places none.
        initial: The policy with which the run began, which is the reference; None if it is the recipe's.
    """

    def __init__(
        self, recipe: Recipe, placer: Placer, pools: Pools | None = None, initial: Model | None = None
    ) -> None:
        self._recipe, self.pools, train = recipe, pools, recipe.train
        self._initial = initial or recipe.model
        actor = _load(recipe, placer)
        frozen = frozen_weights(backbone_of(actor.policy))
        self.policy = placer.trainable(actor, train, train)
        self.critic: TrainableModule[ValueModel] | PlacedModel | None = None
        if recipe.critic is not None:
            self.critic = self._placed("critic") or load_critic(recipe.critic, recipe, placer, frozen)
        self.reference: FrozenPolicy | PlacedModel | None = None
        if recipe.needs_reference:
            placed = self._placed("reference")
            self.reference = placed or Reference(actor, self._initial, placer.frozen, placer.empty)
        self.average = None if train.ema is None else WeightAverage(actor, train.ema)
        self.teachers = {} if recipe.teacher is None else self._load_teachers(recipe.teacher, placer)

    @property
    def actor(self) -> Actor:
        """The policy's own module."""
        return self.policy.inner

    @property
    def trained(self) -> dict[str, TrainableModule[Any]]:
        """What is trained in this process, by name."""
        critic = self.critic
        own_critic = {} if critic is None or isinstance(critic, PlacedModel) else {"critic": critic}
        return {"policy": self.policy, **own_critic}

    def _placed(self, role: str, path: str | None = None) -> PlacedModel | None:
        return None if self.pools is None else self.pools.model(role, path)

    @property
    def _frozen(self) -> dict[str, FrozenPolicy]:
        """The modules of this process that are not trained, by name; none of them is the policy's."""
        frozen = {"reference": self.reference}
        frozen |= {f"teacher {path or ''}".strip(): teacher for path, teacher in self.teachers.items()}
        return {name: model for name, model in frozen.items() if isinstance(model, FrozenPolicy) and not model.shared}

    def padding_notes(self) -> list[str]:
        """Return the reasons why passes are padded instead of packed, by model."""
        passes = {name: module.inner.passes for name, module in self.trained.items()}
        passes |= {name: model.passes for name, model in self._frozen.items()}
        by_reason: dict[str, list[str]] = {}
        for name, module_passes in passes.items():
            if module_passes.reason is not None:
                by_reason.setdefault(module_passes.reason, []).append(name)
        return [
            f"rows are padded instead of packed, which is slower, for: {', '.join(names)}; {reason}"
            for reason, names in by_reason.items()
        ]

    def _load_teachers(self, section: Teacher, placer: Placer) -> dict[str | None, FrozenPolicy | PlacedModel | None]:
        """Return the teachers by their paths, of which None is the policy itself; those that servers have are None."""
        teachers: dict[str | None, FrozenPolicy | PlacedModel | None] = {}
        if section.path is None and section.template is not None:
            if self.average is not None:
                teachers[None] = AveragedPolicy(self.actor, self.average)
            elif self.reference is not None and self._recipe.reference is None:
                teachers[None] = self.reference
            else:
                teachers[None] = Reference(self.actor, self._initial, placer.frozen, placer.empty)
        elif section.urls is not None:
            teachers[section.path] = None
        for option, path in section.paths().items():
            if path not in teachers:
                placed = self._placed("teacher", path)
                teachers[path] = placed or load_teacher(section, option, self._recipe, placer)
        return teachers

    def update_ema_and_reference(self, step: int) -> None:
        """After a step, update the averaged weights and the reference from the policy."""
        if self.average is not None:
            self.average.update()
        section = self._recipe.reference
        if section is not None and isinstance(self.reference, Reference) and step % section.refresh_every == 0:
            self.reference.update(self.actor, section.mix)

    def offload(self, device: torch.device, keep_policy: bool) -> HostOffload:
        """Return the host offload of all that rollouts do not need: also the policy, if the engine has a copy."""
        modules: list[nn.Module] = [module.inner for name, module in self.trained.items() if name != "policy"]
        modules += dict.fromkeys(model.actor for model in self._frozen.values())
        if self.average is not None:
            modules.append(self.average)
        if not keep_policy:
            modules.append(self.actor)
        return HostOffload(modules, [module.optimizer.optimizer for module in self.trained.values()], device)


def load_critic(
    section: Critic, recipe: Recipe, placer: Placer, frozen: Mapping[str, nn.Parameter] | None = None
) -> TrainableModule[ValueModel]:
    """Load and place the critic; frozen weights that the policy has too are shared where they stay together."""
    model, train = recipe.model.at(section.path, section.lora), recipe.train
    with naming("critic.path" if section.path else "model.path"):
        values = ValueModel(*load_backbone(model, train.seed, placer.empty))
    if frozen and not placer.sharded and not train.offload_during_rollout:  # which move each model on its own
        share_frozen(frozen, frozen_weights(backbone_of(values.backbone)))
    return placer.trainable(values, section, train)


def load_teacher(section: Teacher, option: str, recipe: Recipe, placer: Placer) -> FrozenPolicy:
    """Load and place the teacher that an option names."""
    model = replace(recipe.model.at(section.paths()[option]), dtype=section.dtype)
    with naming(option):
        return FrozenPolicy(model, placer.frozen, placer.empty)


def load_actor(recipe: Recipe, placer: Placer) -> Actor:
    """Load and place the policy for rollouts alone; it is not trained."""
    actor = _load(recipe, placer, frozen=True)
    placer.frozen(actor)
    return actor


def _load(recipe: Recipe, placer: Placer, frozen: bool = False) -> Actor:
    kind = ScoreModel if recipe.model.scores else Actor
    return kind(load_policy(recipe.model, recipe.train.seed, placer.empty, frozen))
