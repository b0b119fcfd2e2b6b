"""The module that Fabric sets up and the training loop trains: a policy's log-probs, or a reward model's scores."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.models.layers import fuse_layers
from rlkit.models.lora import base_model, score_head
from rlkit.models.packing import PackedPasses, masked_attention, noisy, places_in
from rlkit.ops.logps import DEFAULT_READS, logits_logps, token_logps
from rlkit.ops.masked import ends_of
from rlkit.ops.random import RowNoise
from rlkit.types import PolicyOutput, Reads

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

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        reads: Reads = DEFAULT_READS,
        *,
        noise: RowNoise | None = None,
        ids: Tensor | None = None,
    ) -> PolicyOutput:
        """Return log-probs and other statistics of `softmax(logits / temperature)`, 0 outside the mask.

        Args:
            tokens: [B,T] i64, right-padded (a causal model's tokens never see the padding after them).
            mask: [B,T] bool; the first column never counts, since nothing predicts it.
            temperature: The rollout's.
            reads: What is computed besides log-probs.
            noise: Is added to the embeddings of the tokens.
            ids: [B,T,K] i64, tokens whose log-probs are `top_logps`, in place of the most likely ones.
        """
        of = tokens.flatten()
        if self.chunked:
            hidden, places = self.passes(base_model(self.policy).get_decoder(), tokens, mask, noise)
            head = base_model(self.policy).get_output_embeddings()
            chosen = None if ids is None else ids.flatten(0, 1)[places]
            found = token_logps(hidden, head.weight, head.bias, of[places], temperature, reads=reads, ids=chosen)
        else:
            with noisy(base_model(self.policy), noise, *places_in(tokens)):
                logits = self.logits(tokens)[:, :-1][mask[:, 1:]]
            places = nn.functional.pad(mask[:, 1:], (1, 0)).flatten().nonzero().squeeze(-1)
            chosen = None if ids is None else ids.flatten(0, 1)[places]
            found = logits_logps(logits, of[places], temperature, reads=reads, ids=chosen)

        def placed(x: Tensor) -> Tensor:
            return x.new_zeros(len(of), *x.shape[1:]).index_copy(0, places, x).view(*tokens.shape, *x.shape[1:])

        entropy, squares, *others = (None if x is None else placed(x) for x in found[1:])
        return PolicyOutput(placed(found.logps), entropy, squares, None, *others)

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


class ScoreModel(Actor):
    """Wraps a sequence classifier with one label, based on a decoder; `forward` returns the scores of conversations."""

    closing: Sequence[int] = ()
    stop_ids: Sequence[int] = ()

    def close_with(self, closing: Sequence[int], stop_ids: Collection[int]) -> None:
        """Let the score at the end of a turn be of the conversation to there as the chat template renders it.

        So a classifier reads it elsewhere; the template may add more than the token that ended the turn.

        Args:
            closing: The ids with which the template ends a turn of the assistant.
            stop_ids: The ids that end a turn: `closing` replaces one at the end of a row. Where others follow a turn,
                its score is read behind these ids if they are what is there.
        """
        self.closing, self.stop_ids = list(closing), sorted(stop_ids)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        reads: Reads = DEFAULT_READS,
        *,
        noise: RowNoise | None = None,
        ids: Tensor | None = None,
    ) -> PolicyOutput:
        """Return scores [B,T] f32, of the conversation up to and including each token; 0 outside the mask.

        Args:
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool.
            temperature: Not read.
            reads: Not read.
            noise: Not read.
            ids: Not read.
        """
        closed, places = self._closed(tokens, mask)
        read = torch.zeros_like(closed, dtype=torch.bool)
        read[mask.nonzero()[:, 0], places[mask] + 1] = True  # a hidden state is named by the token that it predicts
        hidden, read_places = self.passes(base_model(self.policy).get_decoder(), closed, read)
        head = score_head(self.policy)
        assert head is not None
        found = head(hidden.to(head.weight.dtype)).squeeze(-1).float()
        scores = found.new_zeros(closed.numel()).index_copy(0, read_places, found).view_as(closed)
        scores = scores.gather(1, places + 1) * mask
        return PolicyOutput(0.0 * scores, None, None, scores)

    def _closed(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return wider rows, closed after the last token under the mask, and where [B,T] the score of a token is."""
        rows, width = tokens.shape
        places = torch.arange(width, device=tokens.device).repeat(rows, 1)
        wider = nn.functional.pad(tokens, (0, len(self.closing) + 1))
        if not self.closing:
            return wider, places
        closing, stop_ids = tokens.new_tensor(self.closing), tokens.new_tensor(self.stop_ids)
        length = torch.arange(len(closing), device=tokens.device)
        behind = torch.arange(1, width + 1, device=tokens.device) - torch.isin(tokens, stop_ids).long()  # [B,T]
        last = width - 1 - mask.int().flip(1).argmax(1, keepdim=True)
        wider = wider.scatter(1, behind.gather(1, last) + length, closing.expand(rows, -1))
        row, end = ends_of(mask).nonzero(as_tuple=True)
        start = behind[row, end]
        there = (wider[row[:, None], start[:, None] + length] == closing).all(-1)
        places[row, end] = torch.where(there, start + len(closing) - 1, end)
        return wider, places

    def _probe(self) -> bool:
        return True  # the head reads hidden states, whatever the model does with its own logits
