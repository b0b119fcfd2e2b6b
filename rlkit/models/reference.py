"""Models that are not trained: the reference that KL is measured against, and a teacher."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from rlkit.models.actor import Actor
from rlkit.models.ema import WeightAverage
from rlkit.models.load import load_policy
from rlkit.models.lora import adapters_off, has_lora
from rlkit.models.packing import PackedPasses
from rlkit.ops.logps import LOGPS
from rlkit.sections import Model
from rlkit.types import PolicyOutput, Reads


class FrozenPolicy:
    """Returns log-probs of a model that is not trained.

    Args:
        model: Where it is loaded from; its adapters are merged.
        place: Moves a module to the device.
        empty: Whether `place` loads the weights as well.
    """

    shared = False
    """Whether its module is the policy's own, and no copy."""

    def __init__(self, model: Model, place: Callable[[Actor], None], empty: bool = False) -> None:
        self.actor = Actor(load_policy(model, empty=empty, frozen=True)).requires_grad_(False)
        place(self.actor)

    @property
    def passes(self) -> PackedPasses:
        """How the actor computes hidden states."""
        return self.actor.passes

    def applied(self) -> AbstractContextManager[None]:
        """Return a context in which the actor has the weights that log-probs are computed with."""
        return nullcontext()

    @torch.no_grad()
    def logps(self, tokens: Tensor, mask: Tensor, temperature: float) -> Tensor:
        """Return log-probs [B,T] f32, 0 outside the mask."""
        return self.actor(tokens, mask, temperature, LOGPS).logps  # type: ignore[no-any-return]

    @torch.no_grad()
    def top(self, tokens: Tensor, mask: Tensor, temperature: float, reads: Reads) -> tuple[Tensor, Tensor]:
        """Return the most likely tokens [B,T,K] i64 and their log-probs [B,T,K+1] f32, 0 outside the mask."""
        out: PolicyOutput = self.actor(tokens, mask, temperature, reads)
        assert out.top_ids is not None
        assert out.top_logps is not None
        return out.top_ids, out.top_logps


class Reference(FrozenPolicy):
    """Returns log-probs of the initial policy; with LoRA it is the actor itself, its adapters off, and no copy.

    Args:
        actor: The policy.
        model: The recipe's section, from which the initial policy is loaded.
        place: Moves a module to the device.
        empty: Whether `place` loads the weights as well.
    """

    def __init__(self, actor: Actor, model: Model, place: Callable[[Actor], None], empty: bool = False) -> None:
        self.shared = has_lora(actor.policy)
        if self.shared:
            self.actor = actor
        else:
            super().__init__(model, place, empty)

    def applied(self) -> AbstractContextManager[None]:
        return adapters_off(self.actor.policy) if self.shared else nullcontext()

    @torch.no_grad()
    def update(self, actor: Actor, mix: float) -> None:
        """Update towards the policy: reference = mix * policy + (1 - mix) * reference; not for a shared one."""
        for mine, theirs in zip(self.actor.parameters(), actor.parameters(), strict=True):
            mine.lerp_(theirs, mix)


class AveragedPolicy(FrozenPolicy):
    """Returns log-probs of the policy with the average of its weights.

    Args:
        actor: The policy.
        average: Of its weights.
    """

    shared = True

    def __init__(self, actor: Actor, average: WeightAverage) -> None:
        self.actor = actor
        self.average = average

    def applied(self) -> AbstractContextManager[None]:
        return self.average.applied()
