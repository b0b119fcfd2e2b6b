"""Packed forward passes: rows without padding, one after another, and prompts that rows share only once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlkit.ops.attention import Layout, autocasted, packed_attention
from rlkit.ops.ragged import ragged_attention
from rlkit.ops.random import RowNoise

PACKED = "rlkit_packed"
"""The attention of packed passes among those of transformers; without a layout it is SDPA's."""

MULTIPLE = 128
"""The length of a packed sequence is a multiple of this."""

Backbone = Any
"""A Hugging Face decoder: it returns `last_hidden_state`."""

GAPS = {torch.float16: 0.02, torch.bfloat16: 0.1}
"""How far a probe may be from plain passes, as a share of the standard deviation, by type; 1e-3 for others."""


WITH_MASKS = {"sdpa", "eager"}
"""Implementations that read a mask of every query and key: on any device, and in any type."""


class Chosen(NamedTuple):
    """Hidden states [N,H] that predict the N tokens under a mask [B,T], and the tokens' places [N] in it, flattened."""

    hidden: Tensor
    places: Tensor


class Packing:
    """The tokens of rows in one sequence: each prompt that several rows share, then what follows it in each of them.

    A row goes on from the last token of its prompt, which predicts the first one after it.

    Args:
        tokens: [B,T] i64.
        mask: [B,T] bool; the first column never counts. What is before a row's first token under it is its prompt.
        apart: Compute prompts that rows share in each of them.
    """

    def __init__(self, tokens: Tensor, mask: Tensor, apart: bool = False) -> None:
        rows, shared = tokens.tolist(), mask.int()
        firsts = shared.argmax(1).tolist()
        ends = (mask.shape[1] - 1 - shared.flip(1).argmax(1)).tolist()
        members: dict[tuple[int, ...], list[int]] = {}
        for i, some in enumerate(mask[:, 1:].any(1).tolist()):
            if some:
                members.setdefault(tuple(rows[i][: max(firsts[i] - 1, 0)]), []).append(i)
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.rows: list[int] = []
        """The row that each token is of; for a prompt that several share, the first of them."""
        self.segments: list[tuple[int, int]] = []
        """Where each segment begins and ends; a token attends to those before it in its own."""
        self.shared: list[tuple[int, int, int]] = []
        """Where a prompt begins and ends, and the last of its rows' segments, which follow it and attend to it too."""
        columns: list[int] = []
        for prompt, mine in members.items():
            begin = len(self.ids)
            start = len(prompt) if len(mine) > 1 and not apart else 0
            self._add(mine[0], prompt[:start], 0)
            columns += [-1] * start
            for i in mine:
                self._add(i, rows[i][start : ends[i]], start)
                columns += range(i * mask.shape[1] + start + 1, i * mask.shape[1] + ends[i] + 1)
            if start:
                self.shared.append((begin, begin + start, len(self.ids)))
        self.longest = max(ends, default=0)
        targets = torch.tensor(columns, dtype=torch.long, device=mask.device)
        self.chosen = (targets >= 0) & mask.flatten()[targets.clamp(min=0)]
        """[N] bool: which tokens of the sequence predict one under the mask."""
        self.places = targets[self.chosen]

    def pad(self, multiple: int) -> None:
        """Add a segment that predicts nothing, so that kernels are needed for few lengths alone."""
        more = -len(self.ids) % multiple
        self._add(0, [0] * more, 0)
        self.chosen = torch.nn.functional.pad(self.chosen, (0, more))

    def _add(self, row: int, tokens: Sequence[int], position: int) -> None:
        if tokens:
            self.segments.append((len(self.ids), len(self.ids) + len(tokens)))
            self.ids += tokens
            self.positions += range(position, position + len(tokens))
            self.rows += [row] * len(tokens)


class PackedPasses:
    """Computes the hidden states that predict the tokens under a mask, in packed passes where they equal plain ones.

    Args:
        backbone: A decoder that is probed; None for plain passes.
    """

    def __init__(self, backbone: Backbone | None) -> None:
        self.packed = False
        """Whether passes are packed: False makes them plain."""
        self.reason: str | None = "its logits are no plain product of its hidden states"
        """Why passes are plain; None if they are packed."""
        self._counts = [0, 0]
        if backbone is not None:
            self.check(backbone)

    def check(self, backbone: Backbone) -> None:
        """Compare packed passes with plain ones where the weights are now; pack them if they are equal."""
        self.reason = _why_plain(backbone)
        self.packed = self.reason is None

    def take_counts(self) -> tuple[int, int]:
        """Return the number of packed passes, and of all, since the last call."""
        plain_ones, packed_ones = self._counts
        self._counts = [0, 0]
        return packed_ones, plain_ones + packed_ones

    def __call__(self, backbone: Backbone, tokens: Tensor, mask: Tensor, noise: RowNoise | None = None) -> Chosen:
        """Return hidden states, in any order.

        Args:
            backbone: Returns hidden states.
            tokens: [B,T] i64, right-padded.
            mask: [B,T] bool; the first column never counts.
            noise: Is added to the embeddings; rows then share no prompts, since each has a noise of its own.
        """
        if self.packed and not bool(mask[:, 1:].any()):  # a dummy row, which is not counted
            return plain(backbone, tokens, mask, noise)
        packing = Packing(tokens, mask, apart=noise is not None) if self.packed else None
        window = getattr(backbone.config.get_text_config(), "sliding_window", None)
        if packing is not None and window is not None and packing.longest > window:
            packing = None
        self._counts[packing is not None] += 1
        if packing is None:
            return plain(backbone, tokens, mask, noise)
        if len(packing.ids) > MULTIPLE:
            packing.pad(MULTIPLE)
        return packed(backbone, packing, tokens.device, noise)


def packed(backbone: Backbone, packing: Packing, device: torch.device, noise: RowNoise | None = None) -> Chosen:
    """Return hidden states from one pass over a packed sequence."""
    positions = torch.tensor(packing.positions, device=device)
    with noisy(backbone, noise, torch.tensor(packing.rows, device=device), positions):
        hidden = backbone(
            input_ids=torch.tensor([packing.ids], device=device),
            position_ids=positions[None],
            attention_mask=torch.empty(1, 1, 1, 1, device=device),  # of the form that transformers leaves as it is
            layout=Layout(packing.segments, packing.shared, device),
            use_cache=False,
        ).last_hidden_state[0]
    return Chosen(hidden[packing.chosen], packing.places)


def plain(backbone: Backbone, tokens: Tensor, mask: Tensor, noise: RowNoise | None = None) -> Chosen:
    """Return the same from one pass over whole rows."""
    chosen = torch.nn.functional.pad(mask[:, 1:], (1, 0))
    with noisy(backbone, noise, *places_in(tokens)):
        hidden = backbone(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1][chosen[:, 1:]]
    return Chosen(hidden, chosen.flatten().nonzero().squeeze(-1))


def places_in(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the row and the place in it of each token of [B,T], flattened: each [B*T] i64."""
    rows, places = (torch.arange(size, device=tokens.device) for size in tokens.shape)
    return rows.repeat_interleave(tokens.shape[1]), places.repeat(tokens.shape[0])


@contextmanager
def noisy(model: Any, noise: RowNoise | None, rows: Tensor, places: Tensor) -> Iterator[None]:
    """Add noise to the embeddings of a model's input in this context, given the row and place of each token [N]."""
    if noise is None:
        yield
        return

    def add(_: Any, __: Any, embeddings: Tensor) -> Tensor:
        found = noise.at(rows, places, embeddings.shape[-1])
        return embeddings + found.view_as(embeddings).to(embeddings.dtype)

    handle = model.get_input_embeddings().register_forward_hook(add)
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def _why_plain(backbone: Backbone) -> str | None:
    """Return why passes cannot be packed: packed ones fail, or differ for two rows of one prompt and one of another."""
    weight, config = next(backbone.parameters()), backbone.config.get_text_config()
    if weight.is_meta:
        return "its weights are not loaded"
    if config._attn_implementation not in {"sdpa", PACKED}:
        return f"its attention is {config._attn_implementation}, and only that of sdpa is packed"
    if getattr(config, "attention_dropout", 0):
        return f"its attention_dropout is {config.attention_dropout:g}, expected 0"
    tokens = torch.tensor([[5, 3, 4, 6, 0], [5, 3, 8, 0, 0], [3, 6, 5, 4, 7]], device=weight.device)
    mask = torch.tensor([[0, 0, 1, 1, 0], [0, 0, 1, 0, 0], [0, 0, 0, 1, 1]], device=weight.device)
    config._attn_implementation = "sdpa"
    expected = plain(backbone, tokens, mask.bool()).hidden
    config._attn_implementation, reason = PACKED, None
    limit = GAPS.get(autocasted(expected).dtype, 1e-3)  # of products, whatever the sums of layers are in
    try:
        found = packed(backbone, Packing(tokens, mask.bool()), weight.device)
        difference = (found.hidden[found.places.argsort()] - expected).float().square().mean().sqrt()
        spread = expected.float().std()
        if not difference <= limit * spread:
            gap = float(difference / spread)
            reason = f"packed passes are {gap:.2g} of their spread away from padded ones, expected at most {limit:g}"
    except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
        reason = f"a packed pass failed with {type(error).__name__}: {error}"
    if reason is not None:
        config._attn_implementation = "sdpa"
    return reason


@contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """Let a model attend by SDPA, or eagerly, in this context, if its own implementation reads no masks."""
    config = model.config.get_text_config()
    chosen = config._attn_implementation
    if chosen not in WITH_MASKS:
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = chosen


def _attend(module: Any, query: Tensor, key: Tensor, value: Tensor, *mask: Tensor | None, **options: Any) -> Any:
    layout: Layout | None = options.pop("layout", None)
    if layout is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, *mask, **options)
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    attend = packed_attention if query.device.type == "cpu" else ragged_attention
    return attend(query, key, value, options["scaling"], layout)[None], None


ALL_ATTENTION_FUNCTIONS.register(PACKED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)
