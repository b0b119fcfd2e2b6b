"""The reference policy that KL is measured against: the initial policy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.models.lora import adapters_off, has_lora
from rlkit.models.packing import PackedPasses
from rlkit.ops.logps import LOGPS
from rlkit.sections import Model


class Reference:
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
            self.actor = Actor(load_policy(model, empty=empty, frozen=True)).requires_grad_(False)
            place(self.actor)

    @property
    def passes(self) -> PackedPasses:
        """How the actor computes hidden states."""
        return self.actor.passes

    @torch.no_grad()
    def update(self, actor: Actor, mix: float) -> None:
        """Update towards the policy: reference = mix * policy + (1 - mix) * reference; not for a shared one."""
        for mine, theirs in zip(self.actor.parameters(), actor.parameters(), strict=True):
            mine.lerp_(theirs, mix)

    @torch.no_grad()
    def logps(self, tokens: Tensor, mask: Tensor, temperature: float) -> Tensor:
        """Return log-probs [B,T] f32, 0 outside the mask."""
        if not self.shared:
            return self.actor(tokens, mask, temperature, LOGPS).logps  # type: ignore[no-any-return]
        with adapters_off(self.actor.policy):
            return self.actor(tokens, mask, temperature, LOGPS).logps  # type: ignore[no-any-return]
