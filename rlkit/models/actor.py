"""The modules that Fabric sets up and the training loop trains: a policy, a reward model, a critic."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlkit.base.errors import RecipeError
from rlkit.models.layers import fuse_layers, narrow_last_mlp
from rlkit.models.lora import base_model, score_head
from rlkit.models.packing import PackedPasses, PlainInputs, embedding_noise, masked_attention
from rlkit.models.recurrent import pack_recurrent_layers
from rlkit.models.routes import routers_of
from rlkit.models.vision import Backbone, RowMedia, backbone_of, picture_inputs, zero_of_vision
from rlkit.ops.candidates import over_candidates
from rlkit.ops.logps import DEFAULT_READS, LOGPS, OutputLayer, logits_logps, token_logps
from rlkit.ops.masked import ends_of
from rlkit.ops.random import RowNoise
from rlkit.types import PolicyOutput, Reads

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM


class Actor(nn.Module):
    """Wraps a causal language model; `forward` returns log-probs and entropies of the tokens under the mask.

    If a probe at the start shows that it equals the model's own logits, the output layer runs on tokens under the mask
    only, and in chunks unless logits have a soft cap; models that transform their logits in ways that
    `output_transform` does not know are called as they are. Prompts that rows share are computed once: see
    `PackedPasses`.
    """

    forward_methods = ("logits", "check_passes")
    """Methods that FSDP treats as `forward`: sharded weights are gathered layer by layer.

    Each has a required argument: on a GPU, FSDP of torch 2.11 fails without any.
    """

    def __init__(self, policy: CausalLM) -> None:
        super().__init__()
        self.policy = policy
        fuse_layers(policy)
        narrow_last_mlp(backbone_of(policy))
        pack_recurrent_layers(backbone_of(policy))
        self.routers = routers_of(backbone_of(policy))
        self.chunked = self._probe()
        self.passes = PackedPasses(backbone_of(policy) if self.chunked else None)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor,
        temperature: float = 1.0,
        reads: Reads = DEFAULT_READS,
        *,
        noise: RowNoise | None = None,
        media: RowMedia | None = None,
    ) -> PolicyOutput:
        """Return log-probs and other statistics of `softmax(logits / temperature)`, 0 outside the mask.

        Args:
            tokens: [B,T] i64, right-padded (a causal model's tokens never see the padding after them).
            mask: [B,T] bool; the first column never counts, since nothing predicts it.
            temperature: Temperature of the rollout.
            reads: Statistics to compute besides log-probs.
            noise: Noise to add to the embeddings.
            media: [B] the pictures of each row; None without pictures.
        """
        flat = tokens.flatten()
        model, candidates = base_model(self.policy), reads.candidates
        backbone = backbone_of(self.policy)
        ids = reads.ids if candidates is None else candidates.clamp(min=0).long()
        routing = self.passes.routing(reads.expert_routes)
        requested, reads = reads, reads._replace(ids=None, candidates=None) if candidates is None else LOGPS
        if self.chunked:
            with router_logits(backbone, requested.router) as routed:
                hidden, indices, predicts = self.passes(backbone, tokens, mask, noise, media, routing=routing)
            head = model.get_output_embeddings()
            ids = None if ids is None else ids.flatten(0, 1)[indices]
            scale, softcap = output_transform(backbone)
            layer = OutputLayer(head.weight, head.bias, temperature / scale, softcap and softcap / temperature)
            statistics = token_logps(hidden, layer, flat[indices], reads=reads, ids=ids)
        else:
            inputs = PlainInputs.of(backbone, tokens, mask, media, self.passes.sequence, routing=routing)
            indices, predicts = inputs.indices, inputs.predicts
            with (
                embedding_noise(model, noise, inputs.rows, inputs.positions),
                router_logits(backbone, requested.router) as routed,
            ):
                logits = self.policy(input_ids=inputs.tokens, use_cache=False, **inputs.options).logits[predicts]
            ids = None if ids is None else ids.flatten(0, 1)[indices]
            statistics = logits_logps(logits, flat[indices], temperature, reads=reads, ids=ids)

        if candidates is not None:
            statistics = over_candidates(statistics, candidates.flatten(0, 1)[indices], requested)

        rows, columns = indices // tokens.shape[1], indices % tokens.shape[1]

        def scatter(x: Tensor) -> Tensor:
            """Return x [N,...] of all ranks at its tokens of [B,T,...], 0 elsewhere; no view, which FSDP2 warns of."""
            zeros = x.new_zeros(*tokens.shape, *x.shape[1:])
            return self.passes.sum_slices(zeros.index_put((rows, columns), x))

        logps, entropy, squares, mean, top_ids, top = (None if x is None else scatter(x) for x in statistics)
        assert logps is not None
        logps = logps + zero_of_vision(self.policy)
        router_loss = load_balancing_loss(routed, predicts, backbone) if requested.router else None
        return PolicyOutput(logps, entropy, squares, None, mean, top_ids, top, router_loss)

    def check_passes(self, device: torch.device) -> None:
        """Compare packed passes with plain ones on the weights' current device; pack passes if they are equal."""
        if self.chunked:
            self.passes.check(backbone_of(self.policy), device)
        self.passes.check_division(backbone_of(self.policy), device)

    def logits(self, tokens: Tensor, media: RowMedia | None = None) -> Tensor:
        """Return the model's own logits [B,T,V] of tokens [B,T], with the pictures [B] of each row."""
        inputs = picture_inputs(backbone_of(self.policy), tokens, media)
        logits: Tensor = self.policy(input_ids=tokens, use_cache=False, **inputs).logits
        return logits

    @torch.no_grad()
    def _probe(self) -> bool:
        head = base_model(self.policy).get_output_embeddings()
        if type(head) is not nn.Linear or head.weight.is_meta:  # a module without weights cannot be compared
            return False
        tokens = torch.arange(2, 10, device=head.weight.device)[None] % head.weight.shape[0]
        with masked_attention(base_model(self.policy)):
            try:
                hidden = backbone_of(self.policy)(input_ids=tokens, use_cache=False).last_hidden_state
            except (AttributeError, TypeError):
                return False
            scale, softcap = output_transform(backbone_of(self.policy))
            return torch.allclose(capped(head(hidden) * scale, softcap), self.logits(tokens), rtol=1e-4, atol=1e-4)


def output_transform(backbone: Backbone) -> tuple[float, float | None]:
    """Return the scale that a model applies to its output layer's products, and the bound of their soft cap or None."""
    config: Any = backbone.config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier", "output_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return scale, getattr(config, "final_logit_softcapping", None)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """Return `softcap * tanh(logits / softcap)`; unchanged without a cap."""
    return logits if softcap is None else (logits / softcap).tanh() * softcap


@contextmanager
def router_logits(backbone: Backbone, recorded: bool) -> Iterator[list[Tensor]]:
    """Collect the router's logits [L,E] of each layer with experts, if `recorded`, in this context."""
    collected: list[Tensor] = []
    handles = []
    if recorded:

        def request(_: object, args: Any, options: dict[str, Any]) -> Any:
            return args, options | {"output_router_logits": True}

        def collect(_: object, __: object, output: Any) -> None:
            collected.extend(output.router_logits or ())

        handles.append(backbone.register_forward_pre_hook(request, with_kwargs=True))
        handles.append(backbone.register_forward_hook(collect))
    try:
        yield collected
    finally:
        for handle in handles:
            handle.remove()


def load_balancing_loss(router_logits: Sequence[Tensor], chosen: Tensor, backbone: Backbone) -> Tensor:
    """Return the loss of Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4 to 6) over all layers.

    Args:
        router_logits: [L,E] of each layer with experts.
        chosen: [L] or [B,T] bool, the tokens that count.
        backbone: The model of these layers.

    Returns:
        Scalar f32: E * sum over experts of (assignments per token) * (mean probability). If the load is even, it is the
        number of experts per token.

    Raises:
        RecipeError: The model returned no router logits.
    """
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    if not router_logits:
        raise RecipeError(f"{type(backbone).__name__} returns no router logits; set train.router_aux_loss_coef: 0")
    logits = tuple(x.view(-1, x.shape[-1])[chosen.flatten()].float() for x in router_logits)
    top_k = backbone.config.get_text_config().num_experts_per_tok
    loss: Tensor = load_balancing_loss_func(logits, logits[0].shape[-1], top_k)
    return loss


class ScoreModel(Actor):
    """Wraps a sequence classifier with one label, based on a decoder; `forward` returns the scores of conversations."""

    closing: Sequence[int] = ()
    stop_ids: Sequence[int] = ()

    def close_with(self, closing: Sequence[int], stop_ids: Collection[int]) -> None:
        """Score each turn's prefix as the chat template renders it, as other users of the classifier do.

        The template may add more than the token that ended the turn.

        Args:
            closing: The ids with which the template ends a turn of the assistant.
            stop_ids: The ids that end a turn. At the end of a row, `closing` replaces such an id. Inside a row, the
                score of a turn is read after `closing` if the turn ends with these ids.
        """
        self.closing = list(closing)
        self.stop_ids = sorted(stop_ids)

    def forward(
        self, tokens: Tensor, mask: Tensor, *_args: object, media: RowMedia | None = None, **_options: object
    ) -> PolicyOutput:
        """Return scores [B,T] f32 of the conversation up to and including each token; 0 outside the mask.

        Args:
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool.
            media: [B] the pictures of each row; None without pictures.
        """
        closed, columns = self._closed(tokens, mask)
        scored = torch.zeros_like(closed, dtype=torch.bool)
        scored[mask.nonzero()[:, 0], columns[mask] + 1] = True  # a hidden state is indexed by the token it predicts
        hidden, indices, _ = self.passes(backbone_of(self.policy), closed, scored, media=media)
        head = score_head(self.policy)
        assert head is not None
        outputs = head(hidden.to(head.weight.dtype)).squeeze(-1).float()
        scores = outputs.new_zeros(closed.numel()).index_copy(0, indices, outputs).view_as(closed)
        scores = self.passes.sum_slices(scores).gather(1, columns + 1) * mask
        return PolicyOutput(0.0 * scores, None, None, scores)

    def _closed(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return wider rows, closed after the last token under the mask, and the column [B,T] of each token's score."""
        rows, width = tokens.shape
        columns = torch.arange(width, device=tokens.device).repeat(rows, 1)
        wider = nn.functional.pad(tokens, (0, len(self.closing) + 1))
        closing = tokens.new_tensor(self.closing)
        stop_ids = tokens.new_tensor(self.stop_ids)
        offsets = torch.arange(len(closing), device=tokens.device)
        # [B,T], the column at which `closing` starts if a turn ends with this token
        starts = torch.arange(1, width + 1, device=tokens.device) - torch.isin(tokens, stop_ids).long()
        last = width - 1 - mask.int().flip(1).argmax(1, keepdim=True)
        wider = wider.scatter(1, starts.gather(1, last) + offsets, closing.expand(rows, -1))
        row, end = ends_of(mask).nonzero(as_tuple=True)
        start = starts[row, end]
        is_closed = (wider[row[:, None], start[:, None] + offsets] == closing).all(-1)
        columns[row, end] = torch.where(is_closed, start + len(closing) - 1, end)
        return wider, columns

    def _probe(self) -> bool:
        return True  # the head reads hidden states, not logits


class ValueModel(nn.Module):
    """A transformer backbone with a value head; passes are packed as in `Actor`.

    Args:
        backbone: A Hugging Face model that returns hidden states.
        head: The initial value head, from hidden states to one number; None for zeros.
    """

    forward_methods = ("check_passes",)
    """As in `Actor`."""

    def __init__(self, backbone: CausalLM, head: nn.Linear | None = None) -> None:
        super().__init__()
        self.backbone = backbone
        fuse_layers(backbone)
        narrow_last_mlp(backbone)
        pack_recurrent_layers(backbone)
        self.passes = PackedPasses(backbone)
        if head is None:
            head = nn.Linear(backbone.config.get_text_config().hidden_size, 1, bias=False)
            nn.init.zeros_(head.weight)
        self.head = head.requires_grad_(True)

    def check_passes(self, device: torch.device) -> None:
        """Compare packed passes with plain ones on the weights' current device; pack passes if they are equal."""
        self.passes.check(self.backbone, device)
        self.passes.check_division(self.backbone, device)

    def forward(self, tokens: Tensor, mask: Tensor, media: RowMedia | None = None) -> Tensor:
        """Return values [B,T] f32, 0 outside the mask; `values[b,t]` is that of the state before `tokens[b,t]`.

        Args:
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool.
            media: [B] the pictures of each row; None without pictures.
        """
        hidden, indices, _ = self.passes(self.backbone, tokens, mask, media=media)
        values = self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()
        placed = torch.zeros(tokens.numel(), device=tokens.device).index_copy(0, indices, values).view_as(tokens)
        return self.passes.sum_slices(placed) + zero_of_vision(self.backbone)
