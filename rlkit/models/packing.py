"""Packed forward passes: rows are concatenated without padding, and shared prompts are computed once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkit.models.vision import (
    RowMedia,
    media_inputs,
    picture_inputs,
    rotary_positions,
    sees_pictures_both_ways,
)
from rlkit.ops.attention import Layout, autocasted, packed_attention
from rlkit.ops.ragged import ragged_attention
from rlkit.ops.random import RowNoise

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM
    from rlkit.media import Media, MediaSegment

PACKED = "rlkit_packed"
"""The name of the packed attention in the registry of transformers; without a layout it is SDPA."""

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
    """

    hidden: Tensor
    indices: Tensor


class Packing:
    """The tokens of rows in one sequence: each shared prompt once, followed by the rest of each of its rows.

    The last token of a prompt is repeated at the start of each row's rest, where it predicts the next token.

    Args:
        tokens: [B,T] i64.
        mask: [B,T] bool; the first column never counts. A row's prompt ends before its first token under the mask.
        media: [B] the pictures of each row; None without pictures.
        share_prompts: Whether prompts that several rows share, pictures included, are computed once.
    """

    def __init__(self, tokens: Tensor, mask: Tensor, media: RowMedia | None = None, share_prompts: bool = True) -> None:
        rows = tokens.tolist()
        pictures = [None] * len(rows) if media is None else list(media)
        columns = mask.int()
        firsts = columns.argmax(1).tolist()
        ends = (mask.shape[1] - 1 - columns.flip(1).argmax(1)).tolist()
        rows_by_prompt: dict[tuple[tuple[int, ...], tuple[str, ...]], list[int]] = {}
        for i, has_tokens in enumerate(mask[:, 1:].any(1).tolist()):
            if has_tokens:
                prompt = tuple(rows[i][: max(firsts[i] - 1, 0)])
                rows_by_prompt.setdefault((prompt, _shared_key(pictures[i], len(prompt), i)), []).append(i)
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.rows: list[int] = []
        """The row of each token; the first row for a shared prompt."""
        self.segments: list[tuple[int, int]] = []
        """(start, end) of each segment; see `Layout`."""
        self.shared: list[tuple[int, int, int]] = []
        """(start, end, last) of each shared prompt; see `Layout`."""
        self.media: list[MediaSegment] = []
        """The pictures, in the order of their placeholders."""
        next_tokens: list[int] = []  # the flat index of the token that each token predicts, -1 for none
        for (prompt, _), members in rows_by_prompt.items():
            begin = len(self.ids)
            shared_length = len(prompt) if len(members) > 1 and share_prompts else 0
            self._add(members[0], prompt[:shared_length], 0)
            self._add_media(pictures[members[0]], 0, shared_length)
            next_tokens += [-1] * shared_length
            for i in members:
                self._add(i, rows[i][shared_length : ends[i]], shared_length)
                self._add_media(pictures[i], shared_length, ends[i])
                next_tokens += range(i * mask.shape[1] + shared_length + 1, i * mask.shape[1] + ends[i] + 1)
            if shared_length:
                self.shared.append((begin, begin + shared_length, len(self.ids)))
        self.longest = max(ends, default=0)
        """The length of the longest row, up to its last token under the mask."""
        targets = torch.tensor(next_tokens, dtype=torch.long, device=mask.device)
        self.predicts = (targets >= 0) & mask.flatten()[targets.clamp(min=0)]
        """[L] bool: which tokens of the sequence predict a token under the mask."""
        self.indices = targets[self.predicts]
        """[N] i64: the indices of the predicted tokens in the flattened mask."""

    def pad(self, multiple: int) -> None:
        """Add a segment that predicts nothing, so that kernels are compiled for few lengths."""
        padding = -len(self.ids) % multiple
        self._add(0, [0] * padding, 0)
        self.predicts = torch.nn.functional.pad(self.predicts, (0, padding))

    def _add(self, row: int, tokens: Sequence[int], position: int) -> None:
        if tokens:
            self.segments.append((len(self.ids), len(self.ids) + len(tokens)))
            self.ids += tokens
            self.positions += range(position, position + len(tokens))
            self.rows += [row] * len(tokens)

    def _add_media(self, media: Media | None, start: int, end: int) -> None:
        """Add the pictures of a row whose placeholders end after `start` and up to `end`."""
        if media is not None:
            self.media += [segment for segment in media.segments if start < segment.end <= end]


def _shared_key(media: Media | None, prompt: int, row: int) -> tuple[str, ...]:
    """Return what rows have alike whose prompts may be computed once: their pictures in so many first tokens.

    A row shares nothing if a picture ends with the last token of its prompt, which is not computed with the others.
    """
    if media is None:
        return ()
    if any(segment.end == prompt + 1 for segment in media.segments):
        return (str(row),)
    shared = media.before(prompt)
    return () if shared is None else shared.key


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
        self._packed_count = 0
        self._plain_count = 0
        if backbone is not None:
            self.check(backbone)

    def check(self, backbone: Backbone) -> None:
        """Compare packed passes with plain ones on the weights' current device; pack passes if they are equal."""
        self.reason = _packing_problem(backbone)
        self.packed = self.reason is None
        if self.packed and sees_pictures_both_ways(backbone):
            self.packs_pictures = False
            self.reason = "its pictures are seen in both directions; rows of texts alone are packed"

    def packs(self, media: RowMedia | None) -> bool:
        """Return whether rows with these pictures are packed."""
        return self.packed and (self.packs_pictures or not any(media or ()))

    def take_counts(self) -> tuple[int, int]:
        """Return the number of packed passes and of all passes since the last call."""
        counts = self._packed_count, self._packed_count + self._plain_count
        self._packed_count = 0
        self._plain_count = 0
        return counts

    def __call__(
        self,
        backbone: Backbone,
        tokens: Tensor,
        mask: Tensor,
        noise: RowNoise | None = None,
        media: RowMedia | None = None,
    ) -> MaskedHidden:
        """Return hidden states, in any order.

        Args:
            backbone: A decoder.
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool; the first column never counts.
            noise: Noise to add to the embeddings. Rows then share no prompts, since each row has its own noise.
            media: [B] the pictures of each row; None without pictures.
        """
        if self.packed and not bool(mask[:, 1:].any()):  # a dummy row, which is not counted
            return plain_pass(backbone, tokens, mask, noise, media)
        packing = Packing(tokens, mask, media, share_prompts=noise is None) if self.packs(media) else None
        window = getattr(backbone.config.get_text_config(), "sliding_window", None)
        if packing is not None and window is not None and packing.longest > window:
            packing = None
        if packing is None:
            self._plain_count += 1
            return plain_pass(backbone, tokens, mask, noise, media)
        self._packed_count += 1
        if len(packing.ids) > MULTIPLE:
            packing.pad(MULTIPLE)
        grid = rotary_positions(backbone, tokens, media) if media is not None else None
        return packed_pass(backbone, packing, tokens.device, noise, grid)


def packed_pass(
    backbone: Backbone,
    packing: Packing,
    device: torch.device,
    noise: RowNoise | None = None,
    grid: Tensor | None = None,
) -> MaskedHidden:
    """Return hidden states from one pass over a packed sequence; `grid` [3,B,T] has positions of rows with pictures."""
    positions = torch.tensor(packing.positions, device=device)
    rows = torch.tensor(packing.rows, device=device)
    tokens = torch.tensor([packing.ids], device=device)
    position_ids = positions[None]
    if grid is not None:
        position_ids = grid[:, None, rows, positions.clamp(max=grid.shape[-1] - 1)]  # the padding may be longer
    with embedding_noise(backbone, noise, rows, positions):
        hidden = backbone(
            input_ids=tokens,
            position_ids=position_ids,
            attention_mask=torch.empty(1, 1, 1, 1, device=device),  # 4 dimensions: transformers leaves it as it is
            layout=Layout(packing.segments, packing.shared, device),
            use_cache=False,
            **media_inputs(backbone, tokens, packing.media),
        ).last_hidden_state[0]
    return MaskedHidden(hidden[packing.predicts], packing.indices)


def plain_pass(
    backbone: Backbone, tokens: Tensor, mask: Tensor, noise: RowNoise | None = None, media: RowMedia | None = None
) -> MaskedHidden:
    """Return hidden states from one pass over padded rows."""
    mask = torch.nn.functional.pad(mask[:, 1:], (1, 0))
    inputs = picture_inputs(backbone, tokens, media)
    with embedding_noise(backbone, noise, *rows_and_positions(tokens)):
        hidden = backbone(input_ids=tokens, use_cache=False, **inputs).last_hidden_state[:, :-1][mask[:, 1:]]
    return MaskedHidden(hidden, mask.flatten().nonzero().squeeze(-1))


def rows_and_positions(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the position of each token of [B,T], flattened: each [B*T] i64."""
    rows, positions = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    return rows.repeat_interleave(tokens.shape[1]), positions.repeat(tokens.shape[0])


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
def _packing_problem(backbone: Backbone) -> str | None:
    """Return why passes cannot be packed: they fail or differ from plain ones on 3 rows, 2 of which share a prompt."""
    weight = next(backbone.parameters())
    config = backbone.config.get_text_config()
    if weight.is_meta:
        return "its weights are not loaded"
    if config._attn_implementation not in {"sdpa", PACKED}:
        return f"its attention is {config._attn_implementation}, and only sdpa can be packed"
    if getattr(config, "attention_dropout", 0):
        return f"its attention_dropout is {config.attention_dropout:g}, expected 0"
    tokens = torch.tensor([[5, 3, 4, 6, 0], [5, 3, 8, 0, 0], [3, 6, 5, 4, 7]], device=weight.device)
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]], device=weight.device)
    config._attn_implementation = "sdpa"
    expected = plain_pass(backbone, tokens, mask.bool()).hidden
    config._attn_implementation = PACKED
    reason = None
    tolerance = TOLERANCES.get(autocasted(expected).dtype, 1e-3)  # by the type of products, not of the residual stream
    try:
        actual = packed_pass(backbone, Packing(tokens, mask.bool()), weight.device)
        difference = (actual.hidden[actual.indices.argsort()] - expected).float().square().mean().sqrt()
        std = expected.float().std()
        if not difference <= tolerance * std:
            relative = float(difference / std)
            reason = f"packed passes differ by {relative:.2g} standard deviations, expected at most {tolerance:g}"
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = f"a packed pass failed with {type(error).__name__}: {error}"
    if reason is not None:
        config._attn_implementation = "sdpa"
    return reason


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


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor | None, **options: Any) -> Any:
    layout: Layout | None = options.pop("layout", None)
    if layout is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *mask, **options)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = packed_attention if query.device.type == "cpu" else ragged_attention
    return attend(query, key, value, options["scaling"], layout)[None], None


ALL_ATTENTION_FUNCTIONS.register(PACKED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)
