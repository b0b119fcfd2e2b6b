"""The critic: a value for each token that the policy chose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

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
        self.head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return values [B,T] f32, 0 outside the mask; `values[b,t]` is of the state before `tokens[b,t]` was chosen.

        Args:
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool.
        """
        chosen = mask[:, 1:]
        hidden = self.backbone(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][chosen]
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
        empty = torch.zeros(tokens.shape, device=tokens.device)
        return empty.masked_scatter(nn.functional.pad(chosen, (1, 0)), values)
