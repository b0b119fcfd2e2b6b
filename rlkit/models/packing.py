"""Packed forward passes: rows are concatenated without padding, and shared prompts are computed once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from rlkit.distributed.sequence import SequenceGroup
from rlkit.models.attention import PACKED, layer_types, packing_problem
from rlkit.models.routes import Routing
from rlkit.models.vision import RowMedia, media_inputs, picture_inputs, rotary_positions, sees_pictures_both_ways
from rlkit.ops.attention import Layout, autocasted
from rlkit.ops.packing import Packing
from rlkit.ops.random import RowNoise

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

MULTIPLE = 128
"""The length of a packed sequence is a multiple of this."""

Backbone = Any
"""A Hugging Face decoder, which returns `last_hidden_state`."""

TOLERANCES = {torch.float16: 0.02, torch.bfloat16: 0.1}
"""Maximum RMS difference of packed from plain passes, relative to the standard deviation, by type; 1e-3 by default."""

WITH_MASKS = {"sdpa", "eager"}
"""Implementations that accept a mask of queries and keys on any device and in any type."""


class MaskedHidden(NamedTuple):
    """The hidden states that predict the N tokens under a mask [B,T].

    Args:
        hidden: [N,H].
        indices: [N] i64, the indices of the predicted tokens in the flattened mask.
        predicts: [L] or [B,T] bool, which tokens of the pass these states belong to.
    """

    hidden: Tensor
    indices: Tensor
    predicts: Tensor


class PackedPasses:
    """Computes the hidden states that predict the tokens under a mask, in packed passes if these equal plain ones.

    Args:
        backbone: A decoder to probe; None for plain passes.
    """

    def __init__(self, backbone: Backbone | None) -> None:
        self.packed = False
        """Whether passes are packed."""
        self.reason: str | None = "its logits are not a plain product of its hidden states"
        """Why passes are plain; None if they are packed."""
        self.packs_pictures = True
        """Whether passes over rows with pictures are packed where others are."""
        self.sequence: SequenceGroup | None = None
        """The ranks that divide the tokens of a pass; None if each rank computes all of its rows."""
        self.division_problem: str | None = None
        """Why tokens cannot be divided."""
        self._replayed: list[Tensor] = []
        self._packed_count = self._plain_count = 0
        if backbone is not None:
            self.check(backbone, next(backbone.parameters()).device)

    def check(self, backbone: Backbone, device: torch.device) -> None:
        """Compare packed passes with plain ones on the weights' current device; pack passes if they are equal."""
        self.reason = _packing_problem(backbone, device)
        self.packed = self.reason is None
        if self.packed and sees_pictures_both_ways(backbone):
            self.packs_pictures = False
            self.reason = "its pictures are seen in both directions; rows of texts alone are packed"

    def check_division(self, backbone: Backbone, device: torch.device) -> None:
        """Compare passes whose tokens are divided with undivided ones; all ranks must call this."""
        if self.sequence is not None:
            backbone.config.get_text_config()._attn_implementation = PACKED
            self.division_problem = _division_problem(backbone, self.sequence, device)

    def sum_slices(self, x: Tensor) -> Tensor:
        """Sum [B,T,...] over ranks, each of which has 0 where another has computed it.

        All ranks must call this.
        """
        return x if self.sequence is None else self.sequence.sum_slices(x)  # agreed: set on all ranks by the strategy

    def packs(self, media: RowMedia | None) -> bool:
        """Check whether rows with these pictures are packed."""
        return self.packed and (self.packs_pictures or not any(media or ()))

    def take_counts(self) -> tuple[int, int]:
        """Return the number of packed passes and of all passes since the last call."""
        counts = self._packed_count, self._packed_count + self._plain_count
        self._packed_count = self._plain_count = 0
        return counts

    def routing(self, routes: Tensor | None) -> Routing | None:
        """Return the routing that selects these experts [B,T,R,K]; None for the routers' own choice."""
        return None if routes is None else Routing(routes, self._replayed)

    def take_replayed(self) -> tuple[float, float]:
        """Return the number of selections of routers that replay has changed since the last call, and of all."""
        differing, compared = torch.stack(self._replayed).sum(0).tolist() if self._replayed else (0, 0)
        self._replayed.clear()
        return differing, compared

    def __call__(
        self,
        backbone: Backbone,
        tokens: Tensor,
        mask: Tensor,
        noise: RowNoise | None = None,
        media: RowMedia | None = None,
        *,
        routing: Routing | None = None,
    ) -> MaskedHidden:
        """Return hidden states, in any order; with `sequence`, those of this rank's slice of the tokens.

        Args:
            backbone: A decoder.
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool; the first column never counts.
            noise: Noise to add to the embeddings. Rows then share no prompts, since each row has its own noise.
            media: [B] the pictures of each row; None without pictures.
            routing: The experts to select; None for the routers' own choice.
        """
        is_dummy = self.packed and not bool(mask[:, 1:].any())  # a row that is not counted
        packing = Packing(tokens, mask, media, share_prompts=noise is None) if self.packs(media) else None
        if is_dummy or packing is None:
            self._plain_count += not is_dummy
            inputs = PlainInputs.of(backbone, tokens, mask, media, self.sequence, routing=routing)
            return plain_pass(backbone, inputs, noise)
        self._packed_count += 1
        multiple = MULTIPLE if len(packing.ids) > MULTIPLE else 1
        packing.pad(multiple if self.sequence is None else lcm(multiple, self.sequence.size))
        grid = rotary_positions(backbone, tokens, media) if media is not None else None
        return packed_pass(backbone, packing, noise, grid=grid, sequence=self.sequence, routing=routing)


def packed_pass(
    backbone: Backbone,
    packing: Packing,
    noise: RowNoise | None = None,
    *,
    grid: Tensor | None = None,
    sequence: SequenceGroup | None = None,
    routing: Routing | None = None,
) -> MaskedHidden:
    """Return hidden states from one pass over a packed sequence.

    Args:
        backbone: A decoder.
        packing: The sequence; if it is divided, of a multiple of `sequence.size` tokens.
        noise: Noise to add to the embeddings.
        grid: [3,B,T] positions of rows with pictures.
        sequence: The ranks that divide the sequence.
        routing: The experts to select; for a shared prompt, those of its first row.
    """
    device = packing.predicts.device
    positions = torch.tensor(packing.positions, device=device)
    rows = torch.tensor(packing.rows, device=device)
    tokens = torch.tensor([packing.ids], device=device)
    predicts, indices = packing.predicts, packing.indices
    media = media_inputs(backbone, tokens, packing.media)
    if sequence is not None:
        targets = torch.zeros_like(positions).masked_scatter(predicts, indices)
        inputs = (tokens, rows, positions, predicts, targets)
        tokens, rows, positions, predicts, targets = (sequence.slice(x) for x in inputs)
        indices = targets[predicts]
        media = sequence.options(positions[None])
    position_ids = positions[None]
    if grid is not None:
        position_ids = grid[:, None, rows, positions.clamp(max=grid.shape[-1] - 1)]  # the padding may be longer
    read = predicts.nonzero().squeeze(-1)
    computed = None
    if sequence is None:
        computed = rounded_up(read, len(predicts)) if device.type == "cpu" else read
    layout = Layout(packing.segments, packing.shared, device, computed)
    options = {
        "position_ids": position_ids,
        "attention_mask": torch.empty(1, 1, 1, 1, device=device),  # 4 dimensions: transformers leaves it as it is
        "layout": layout,
    } | ({} if routing is None else routing.arrange(rows, positions))
    with embedding_noise(backbone, noise, rows, positions):
        hidden = backbone(input_ids=tokens, use_cache=False, **options | media).last_hidden_state.squeeze(0)
    windowed = layer_types(backbone.config.get_text_config()).count("sliding_attention")
    if windowed > sum(window is not None for window in layout.windows):
        raise ValueError(f"not all of its {windowed} layers with a sliding window tell their attention")
    return MaskedHidden(hidden.index_select(0, read), indices, predicts)


def rounded_up(read: Tensor, length: int) -> Tensor:
    """Return the indices [N] i64 of tokens, then other tokens of `length` up to a multiple of 128 in all.

    oneDNN compiles kernels for each number of rows. Sequences of up to 128 tokens get no others.
    """
    if length <= MULTIPLE:
        return read
    others = torch.ones(length, dtype=torch.bool).index_fill_(0, read, False)
    return torch.cat([read, others.nonzero().squeeze(-1)[: -len(read) % MULTIPLE]])


class PlainInputs(NamedTuple):
    """The inputs of a pass over padded rows, all of them or this rank's slice of the columns.

    Args:
        tokens: [B,L] i64.
        rows: [B*L] i64, the row of each token.
        positions: [B*L] i64.
        predicts: [B,L] bool, which tokens predict one under the mask.
        indices: [N] i64, of the predicted tokens in the flattened mask.
        options: Further arguments of the model.
    """

    tokens: Tensor
    rows: Tensor
    positions: Tensor
    predicts: Tensor
    indices: Tensor
    options: dict[str, Any]

    @classmethod
    def of(
        cls,
        backbone: Backbone,
        tokens: Tensor,
        mask: Tensor,
        media: RowMedia | None = None,
        sequence: SequenceGroup | None = None,
        *,
        routing: Routing | None = None,
    ) -> PlainInputs:
        """Return the inputs for rows [B,T] with a mask [B,T], pictures [B] and routes, divided by `sequence`."""
        width = tokens.shape[1]
        options: dict[str, object] = {**picture_inputs(backbone, tokens, media)}
        rows, positions = (torch.arange(size, device=tokens.device) for size in tokens.shape)
        rows, positions = rows[:, None].expand_as(tokens), positions.expand_as(tokens)
        predicts = nn.functional.pad(mask[:, 1:], (0, 1))
        if sequence is not None:
            tokens, rows, positions, predicts = (sequence.slice(x) for x in (tokens, rows, positions, predicts))
            options = sequence.options(positions)
        indices = (rows * width + positions + 1)[predicts]
        if routing is not None:
            options |= routing.arrange(rows.flatten(), positions.flatten())
        return cls(tokens, rows.flatten(), positions.flatten(), predicts, indices, options)


def plain_pass(backbone: Backbone, inputs: PlainInputs, noise: RowNoise | None = None) -> MaskedHidden:
    """Return hidden states from one pass over padded rows."""
    with embedding_noise(backbone, noise, inputs.rows, inputs.positions):
        hidden = backbone(input_ids=inputs.tokens, use_cache=False, **inputs.options).last_hidden_state
    return MaskedHidden(hidden[inputs.predicts], inputs.indices, inputs.predicts)


@contextmanager
def embedding_noise(model: CausalLM, noise: RowNoise | None, rows: Tensor, positions: Tensor) -> Iterator[None]:
    """Add noise to a model's input embeddings in this context, given the row and position of each token [N]."""
    if noise is None:
        yield
        return

    def add(_: object, __: object, embeddings: Tensor) -> Tensor:
        drawn = noise.draw(rows, positions, embeddings.shape[-1])
        return embeddings + drawn.view_as(embeddings).to(embeddings.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _packing_problem(backbone: Backbone, device: torch.device) -> str | None:
    """Explain why passes cannot be packed: they fail or differ from plain ones on 3 rows, 2 of which share a prompt."""
    config = backbone.config.get_text_config()
    if device.type == "meta":
        return "its weights are not loaded"
    problem = packing_problem(backbone)
    if problem is not None:
        return problem
    tokens = torch.tensor([[5, 3, 4, 6, 0], [5, 3, 8, 0, 0], [3, 6, 5, 4, 7]], device=device)
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]], device=device)
    plain = config._attn_implementation = "sdpa" if backbone._supports_sdpa else "eager"
    expected = plain_pass(backbone, PlainInputs.of(backbone, tokens, mask.bool())).hidden
    config._attn_implementation = PACKED
    try:
        actual = packed_pass(backbone, Packing(tokens, mask.bool()))
        reason = _difference("packed", actual.hidden[actual.indices.argsort()], expected)
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        reason = f"a packed pass failed with {type(error).__name__}: {error}"
    if reason is not None:
        config._attn_implementation = plain
    return reason


def _difference(name: str, actual: Tensor, expected: Tensor) -> str | None:
    """Describe the difference of hidden states [N,H] from expected ones; None if they are equal but for rounding."""
    tolerance = TOLERANCES.get(autocasted(expected).dtype, 1e-3)  # by the type of products, not of the residual stream
    difference = (actual - expected).float().square().mean().sqrt()
    std = expected.float().std()
    if difference <= tolerance * std:
        return None
    relative = float(difference / std)
    return f"{name} passes differ by {relative:.2g} standard deviations, expected at most {tolerance:g}"


@torch.no_grad()
def _division_problem(backbone: Backbone, sequence: SequenceGroup, device: torch.device) -> str | None:
    """Explain why tokens cannot be divided: passes fail or differ from undivided ones on 2 rows; all must call this."""
    vocabulary = backbone.config.get_text_config().vocab_size
    tokens = torch.arange(3, 3 + 8 * sequence.size, device=device).view(2, -1) % vocabulary
    mask = torch.ones_like(tokens, dtype=torch.bool)
    plain, divided = (PlainInputs.of(backbone, tokens, mask, None, ranks) for ranks in (None, sequence))
    expected = plain_pass(backbone, plain).hidden[torch.isin(plain.indices, divided.indices)]
    try:
        return _difference("divided", plain_pass(backbone, divided).hidden, expected)
    except (AttributeError, TypeError, ValueError, RuntimeError, LookupError) as error:
        return f"a pass over a slice failed with {type(error).__name__}: {error}"


@contextmanager
def masked_attention(model: CausalLM) -> Iterator[None]:
    """Let a model use SDPA or eager attention in this context if its own implementation accepts no masks."""
    config = model.config.get_text_config()
    configured = config._attn_implementation
    if configured not in WITH_MASKS:
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = configured
