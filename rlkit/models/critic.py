"""The critic: a value for each token that the policy chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.models.layers import fuse_layers
from rlkit.models.packing import PackedPasses

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class ValueModel(nn.Module):
    """A transformer backbone with a value head; passes are packed as in `Actor`.

    Args:
        backbone: A Hugging Face model that returns hidden states.
        head: The initial value head, from hidden states to one number; None for zeros.
    """

    forward_methods = ("check_passes",)
    """Methods that FSDP treats as `forward`."""

    def __init__(self, backbone: CausalLM, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        fuse_layers(backbone)
        self.passes = PackedPasses(backbone)
        if head is None:
            head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(head.weight)
        self.head = head.requires_grad_(True)

    def check_passes(self) -> None:
        """Compare packed passes with plain ones on the weights' current device; pack passes if they are equal."""
        self.passes.check(self.backbone)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return values [B,T] f32, 0 outside the mask; `values[b,t]` is that of the state before `tokens[b,t]`.

        Args:
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool.
        """
        hidden, indices = self.passes(self.backbone, tokens, mask)
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
        return torch.zeros(tokens.numel(), device=tokens.device).index_copy(0, indices, values).view_as(tokens)
