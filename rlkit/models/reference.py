"""Frozen models: the reference of the KL penalty, and teachers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.models.lora import adapters_off, has_lora
from rlkit.models.packing import PackedPasses
from rlkit.models.vision import RowMedia
from rlkit.ops.logps import LOGPS
from rlkit.recipe import Model
from rlkit.types import PolicyOutput, Reads


class FrozenPolicy:
    """Returns log-probs of a model that is not trained.

    Args:
        model: The model to load; its adapters are merged.
        move_to_device: Moves a module to the device.
        empty: Whether `move_to_device` provides the weights as well.
    """

    shared = False
    """Whether its module is the policy itself instead of a copy."""

    def __init__(self, model: Model, move_to_device: Callable[[Actor], None], empty: bool = False) -> None:
        self.actor = Actor(load_policy(model, empty=empty, frozen=True)).requires_grad_(False)
        move_to_device(self.actor)

    @property
    def passes(self) -> PackedPasses:
        """The actor's forward passes."""
        return self.actor.passes

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which the actor has the weights of this model."""
        return nullcontext()

    @torch.no_grad()
    def logps(
        self,
        tokens: Tensor,
        mask: Tensor,
        temperature: float,
        media: RowMedia | None = None,
        candidates: Tensor | None = None,
    ) -> Tensor:
        """Return log-probs [B,T] f32, 0 outside the mask; over the candidates [B,T,K] if there are any."""
        out: PolicyOutput = self.actor(tokens, mask, temperature, LOGPS._replace(candidates=candidates), media=media)
        return out.logps

    @torch.no_grad()
    def top(
        self, tokens: Tensor, mask: Tensor, temperature: float, reads: Reads, media: RowMedia | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most likely tokens [B,T,K] i64, their log-probs [B,T,K+1] f32, and the tokens' [B,T] f32.

        All are 0 outside the mask.
        """
        out: PolicyOutput = self.actor(tokens, mask, temperature, reads, media=media)
        assert out.top_ids is not None
        assert out.top_logps is not None
        return out.top_ids, out.top_logps, out.logps


class Reference(FrozenPolicy):
    """Returns log-probs of the initial policy; with LoRA, those of its base: it shares the actor and disables adapters.

    Args:
        actor: The policy.
        model: The recipe's `model:`, from which the initial policy is loaded.
        move_to_device: Moves a module to the device.
        empty: Whether `move_to_device` provides the weights as well.
    """

    def __init__(
        self, actor: Actor, model: Model, move_to_device: Callable[[Actor], None], empty: bool = False
    ) -> None:
        self.shared = has_lora(actor.policy)
        if self.shared:
            self.actor = actor
        else:
            super().__init__(model, move_to_device, empty)

    def applied(self) -> AbstractContextManager[None]:
        return adapters_off(self.actor.policy) if self.shared else nullcontext()

    @torch.no_grad()
    def update(self, actor: Actor, mix: float) -> None:
        """Update towards the policy: reference = mix * policy + (1 - mix) * reference; not for a shared actor."""
        for parameter, target in zip(self.actor.parameters(), actor.parameters(), strict=True):
            parameter.lerp_(target, mix)


class WeightAverage(nn.Module):
    """The average of a module's trainable parameters: average = decay * average + (1 - decay) * parameter.

    It is a module with buffers only, so that it can be moved between devices.

    Args:
        module: The module to average.
        decay: The decay, from 0 (no memory) to 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self._trained = [p for p in module.parameters() if p.requires_grad]
        for i, parameter in enumerate(self._trained):
            self.register_buffer(str(i), parameter.detach().clone())

    @property
    def tensors(self) -> list[Tensor]:
        """The averages, in the order of the parameters."""
        return list(self.buffers())

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step."""
        for average, parameter in zip(self.tensors, self._trained, strict=True):
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the module within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self.tensors, self._trained, strict=True):
            parameter_copy = parameter.clone()
            parameter.copy_(average)
            average.copy_(parameter_copy)


class AveragedPolicy(FrozenPolicy):
    """Returns log-probs of the policy with the average of its weights.

    Args:
        actor: The policy.
        average: The average of its weights.
    """

    shared = True

    def __init__(self, actor: Actor, average: WeightAverage) -> None:
        self.actor = actor
        self.average = average

    def applied(self) -> AbstractContextManager[None]:
        return self.average.applied()
