"""The policy as a module that returns log-probs: what Fabric sets up and the training loop trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.models.lora import base_model
from rlkit.ops.logps import logits_logps, token_logps
from rlkit.types import PolicyOutput

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class Actor(nn.Module):
    """Wraps a causal language model; `forward` returns log-probs and entropies of the tokens under the mask.

    The output layer runs in chunks, on masked tokens only, where a probe at the start shows that this equals the
    model's own logits; models that transform them (soft caps, scales) are called as they are.
    """

    forward_methods = ("logits",)
    """Methods that FSDP treats as `forward`: sharded weights are gathered layer by layer."""

    def __init__(self, policy: CausalLM) -> None:
        super().__init__()
        self.policy = policy
        self.chunked = self._probe()

    def forward(self, tokens: Tensor, mask: Tensor, temperature: float = 1.0) -> PolicyOutput:
        """Return log-probs, entropies and sums of squares of `softmax(logits / temperature)`, 0 outside the mask.

        Args:
            tokens: [B,T] i64, right-padded (a causal model's tokens never see the padding after them).
            mask: [B,T] bool; the first column never counts, since nothing predicts it.
            temperature: The rollout's.
        """
        chosen = mask[:, 1:]
        targets = tokens[:, 1:][chosen]
        if self.chunked:
            hidden = self._hidden(tokens)[:, :-1][chosen]
            head = base_model(self.policy).get_output_embeddings()
            found = token_logps(hidden, head.weight, head.bias, targets, temperature)
        else:
            logits = self.policy(input_ids=tokens, use_cache=False).logits[:, :-1][chosen]
            found = logits_logps(logits, targets, temperature)
        empty = torch.zeros(tokens.shape, device=tokens.device)
        index = torch.nn.functional.pad(chosen, (1, 0))
        return PolicyOutput(*(empty.masked_scatter(index, x) for x in found))

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the model's own logits [B,T,V] of tokens [B,T]."""
        logits: Tensor = self.policy(input_ids=tokens, use_cache=False).logits
        return logits

    def _hidden(self, tokens: Tensor) -> Tensor:
        hidden: Tensor = base_model(self.policy).get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
        return hidden

    @torch.no_grad()
    def _probe(self) -> bool:
        head = base_model(self.policy).get_output_embeddings()
        if type(head) is not nn.Linear or head.weight.is_meta:  # a module without weights cannot be compared
            return False
        tokens = torch.arange(2, 10, device=head.weight.device)[None] % head.weight.shape[0]
        try:
            hidden = self._hidden(tokens)
        except (AttributeError, TypeError):
            return False
        logits = self.policy(input_ids=tokens, use_cache=False).logits
        return torch.allclose(head(hidden), logits, rtol=1e-4, atol=1e-4)
