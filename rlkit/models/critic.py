"""The critic: a value for each token that the policy chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.models.prefix import Prefixes

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class ValueModel(nn.Module):
    """A transformer's backbone with a value head, which starts at 0.

    Args:
        backbone: A Hugging Face model that returns hidden states.
    """

    def __init__(self, backbone: CausalLM) -> None:
        super().__init__()
        self.backbone = backbone
        self.prefixes = Prefixes(backbone)
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    @property
    def shares_prompts(self) -> bool:
        """Whether prompts that rows share are computed once."""
        return self.prefixes.shared

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return values [B,T] f32, 0 outside the mask; `values[b,t]` is of the state before `tokens[b,t]` was chosen.

        Args:
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool.
        """
        hidden, places = self.prefixes(self.backbone, tokens, mask)
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
        return torch.zeros(tokens.numel(), device=tokens.device).index_copy(0, places, values).view_as(tokens)
