"""The policy as a module that returns log-probs: what Fabric sets up and the training loop trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.models.layers import fuse_layers
from rlkit.models.lora import base_model
from rlkit.models.packing import PackedPasses, masked_attention
from rlkit.ops.logps import USUAL, Reads, logits_logps, token_logps
from rlkit.types import PolicyOutput

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class Actor(nn.Module):
    """Wraps a causal language model; `forward` returns log-probs and entropies of the tokens under the mask.

    The output layer runs in chunks, on masked tokens only, where a probe at the start shows that this equals the
    model's own logits; models that transform them (soft caps, scales) are called as they are. Prompts that rows share
    are computed once: see `PackedPasses`.
    """

    forward_methods = ("logits", "check_passes")
    """Methods that FSDP treats as `forward`: sharded weights are gathered layer by layer."""

    def __init__(self, policy: CausalLM) -> None:
        super().__init__()
        self.policy = policy
        fuse_layers(policy)
        self.chunked = self._probe()
        self.passes = PackedPasses(base_model(policy).get_decoder() if self.chunked else None)

    def forward(self, tokens: Tensor, mask: Tensor, temperature: float = 1.0, reads: Reads = USUAL) -> PolicyOutput:
        """Return log-probs, entropies and sums of squares of `softmax(logits / temperature)`, 0 outside the mask.

        Args:
            tokens: [B,T] i64, right-padded (a causal model's tokens never see the padding after them).
            mask: [B,T] bool; the first column never counts, since nothing predicts it.
            temperature: The rollout's.
            reads: What is computed besides log-probs.
        """
        if self.chunked:
            hidden, places = self.passes(base_model(self.policy).get_decoder(), tokens, mask)
            head = base_model(self.policy).get_output_embeddings()
            targets = tokens.flatten()[places]
            found = token_logps(hidden, head.weight, head.bias, targets, temperature, reads=reads)
        else:
            logits = self.logits(tokens)[:, :-1][mask[:, 1:]]
            places = nn.functional.pad(mask[:, 1:], (1, 0)).flatten().nonzero().squeeze(-1)
            found = logits_logps(logits, tokens.flatten()[places], temperature)
        empty = torch.zeros(tokens.numel(), device=tokens.device)
        logps, entropy, squares = (None if x is None else empty.index_copy(0, places, x).view_as(tokens) for x in found)
        assert logps is not None
        return PolicyOutput(logps, entropy, squares)

    def check_passes(self) -> None:
        """Compare packed passes with plain ones where the weights are now; pack them if they are equal."""
        if self.chunked:
            self.passes.check(base_model(self.policy).get_decoder())

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the model's own logits [B,T,V] of tokens [B,T]."""
        logits: Tensor = self.policy(input_ids=tokens, use_cache=False).logits
        return logits

    @torch.no_grad()
    def _probe(self) -> bool:
        head = base_model(self.policy).get_output_embeddings()
        if type(head) is not nn.Linear or head.weight.is_meta:  # a module without weights cannot be compared
            return False
        tokens = torch.arange(2, 10, device=head.weight.device)[None] % head.weight.shape[0]
        with masked_attention(base_model(self.policy)):
            try:
                hidden = base_model(self.policy).get_decoder()(input_ids=tokens, use_cache=False).last_hidden_state
            except (AttributeError, TypeError):
                return False
            return torch.allclose(head(hidden), self.logits(tokens), rtol=1e-4, atol=1e-4)
