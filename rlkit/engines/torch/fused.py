"""Decoding through fused copies of a model's weights, with one copy of each prompt's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkit.engines.torch.blocks import Block, Matrix, fuse, fuse_head

GROWTH = 64
"""Columns by which the cache grows at least."""


class _Layer:
    """One layer's keys and values: of prompts [P,H,W,D], which end at the last column, and of rows [R,H,C,D]."""

    def __init__(self) -> None:
        self.prompts: tuple[Tensor, ...] = ()
        self.rows: tuple[Tensor, ...] = ()


class FusedDecoder:
    """Decodes rows as `Decoder` does, without the model's modules and in fewer passes over memory.

    The copies of the weights, adapters merged, are in autocast's type if there is one. They are made again at the first
    pass after `refresh`, and where a prompt is admitted after the model's own weights were written. Rows attend to one
    copy of the prompt that they share, and to their own tokens, which end at column `end`, the same for all, and begin
    at `starts[r]`.

    Args:
        model: A causal language model, its adapters inside, whose blocks `fuse` takes.
        autocast: Makes the precision context.
    """

    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.model = model
        self.autocast = autocast
        self.config: Any = self.model.config.get_text_config()
        self.device = next(model.parameters()).device
        self.release()
        self.refresh()

    def release(self) -> None:
        """Drop all rows and release their memory."""
        self.end = 0
        self.starts: list[int] = []
        self.of_row: list[int] = []
        """The prompt of each row."""
        self.lengths: list[int] = []
        """The tokens of each prompt."""
        self.layers = [_Layer() for _ in range(self.config.num_hidden_layers)]

    def refresh(self) -> None:
        """Drop the copies of the weights, since these have changed or nothing is decoded for now."""
        self._blocks: list[Block] = []
        self._head: Matrix | None = None
        self._versions: list[int] = []

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.starts)

    def positions(self) -> Tensor:
        """Return the position [R] i64 of the token that comes next in each row."""
        own = (self.end - start for start in self.starts)
        return torch.tensor([self.lengths[p] + n for p, n in zip(self.of_row, own, strict=True)], device=self.device)

    @torch.inference_mode()
    def admit(self, prompts: Sequence[Sequence[int]], copies: Sequence[int]) -> Tensor:
        """Run the prompts, add `copies[i]` rows for each, in order, and return the rows' next logits [N,V]."""
        if self._versions != [weight._version for weight in self.model.parameters()]:
            self.refresh()
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.device)
        columns = torch.arange(width, device=self.device)
        before = torch.tensor([width - len(p) for p in prompts], device=self.device)
        visible = (columns[None, None] >= before[:, None, None]) & (columns[None, :, None] >= columns[None, None])
        visible = visible | torch.eye(width, dtype=torch.bool, device=self.device)
        mask = self._additive(visible)

        def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            size = queries.shape[-1]
            q, k, v = (x.view(len(prompts), width, -1, size).transpose(1, 2) for x in (queries, keys, values))
            self._add_prompts(self.layers[index], k, v)
            repeats = q.shape[1] // k.shape[1]
            k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
            found = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], scale=1.0)
            return found.transpose(1, 2)

        logits = self._forward(tokens, (columns[None] - before[:, None]).clamp(min=0), attend)
        first = len(self.lengths)
        self.lengths += map(len, prompts)
        self.of_row += [first + i for i, n in enumerate(copies) for _ in range(n)]
        self.starts += [self.end] * sum(copies)
        self._index()
        return logits.repeat_interleave(torch.tensor(copies, device=self.device), dim=0)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token [R] to each row and return the next logits [R,V]."""
        positions = self.positions()
        self.end += 1
        first = min(self.starts)
        columns = torch.arange(first, self.end, device=self.device)
        starts = torch.tensor(self.starts, device=self.device)
        own = None if first == max(self.starts) else self._additive(columns[None] >= starts[:, None])[:, None, None]

        def attend(index: int, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            layer = self.layers[index]
            self._reserve(layer, keys)
            for buffer, new in zip(layer.rows, (keys, values), strict=True):
                buffer[: self.rows, :, self.end - 1] = new
            mine = [x[: self.rows, :, first : self.end] for x in layer.rows]
            return self._attend(queries, layer.prompts, mine, own)

        return self._forward(tokens[:, None], positions[:, None], attend)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Drop all other rows, and the prompts that no row has any more."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        first = min((self.starts[r] for r in rows), default=self.end)
        used = sorted({self.of_row[r] for r in rows})
        width = max((self.lengths[p] for p in used), default=0)
        for layer in self.layers:
            for buffer in layer.rows:
                buffer[: len(rows), :, : self.end - first] = buffer[index, :, first : self.end]
            layer.prompts = tuple(x[used, :, x.shape[2] - width :] for x in layer.prompts)
        place = {prompt: i for i, prompt in enumerate(used)}
        self.of_row = [place[self.of_row[r]] for r in rows]
        self.starts = [self.starts[r] - first for r in rows]
        self.lengths = [self.lengths[p] for p in used]
        self.end -= first
        self._index()

    def _forward(
        self, tokens: Tensor, positions: Tensor, attend: Callable[[int, Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Run tokens [N,Q] through all blocks; return the logits [N,V] of the last of each row."""
        model, kind = self.model.model, self._kind()
        if not self._blocks:
            self._blocks = [fuse(layer, kind) for layer in model.layers]
            self._head = fuse_head(self.model.get_output_embeddings(), model.norm, kind)
            self._versions = [weight._version for weight in self.model.parameters()]
        assert self._head is not None
        hidden = model.embed_tokens(tokens).to(kind)
        cos, sin = (x[..., : x.shape[-1] // 2].float() for x in model.rotary_emb(hidden.float(), positions))
        rotation = torch.complex(cos, sin).flatten(0, 1)[:, None]
        hidden = hidden.flatten(0, 1)
        for i, block in enumerate(self._blocks):
            queries, keys, values = self._project(block, self._normalized(hidden), rotation)
            hidden = block.outputs.plus(attend(i, queries, keys, values).reshape(len(hidden), -1), hidden)
            x = self._normalized(hidden)
            hidden = block.down.plus(block.up.times(x, block.gate.silu(x)), hidden)
        last = self._normalized(hidden.view(*tokens.shape, -1)[:, -1])
        return self._head(last)

    def _project(self, block: Block, x: Tensor, rotation: Tensor) -> Sequence[Tensor]:
        """Return queries, keys and values [N,heads,D] of normalized tokens [N,H]."""
        heads, kv_heads = self.config.num_attention_heads, self.config.num_key_value_heads
        size = block.size
        found = block.inputs(x).view(len(x), -1, size)
        turned, values = found[:, : heads + kv_heads], found[:, heads + kv_heads :]
        if block.head_norms is not None:
            turned = self._normalized(turned) * block.head_norms
        pairs = torch.view_as_complex(turned.float().reshape(*turned.shape[:2], -1, 2))
        turned = torch.view_as_real(pairs * rotation).flatten(-2).to(values.dtype)
        return turned[:, :heads], turned[:, heads:], values

    def _attend(
        self, queries: Tensor, prompts: Sequence[Tensor], own: Sequence[Tensor], own_mask: Tensor | None
    ) -> Tensor:
        """Return what queries [R,heads,D] attend to: keys and values of their prompts, and their own [R,H,C,D]."""
        rows, _, size = queries.shape
        kv_heads = own[0].shape[1]
        queries = queries.reshape(rows, kv_heads, -1, size)
        mine = torch.bmm(queries.flatten(0, 1), own[0].flatten(0, 1).transpose(1, 2)).view(*queries.shape[:3], -1)
        if own_mask is not None:
            mine += own_mask
        shared = torch.bmm(self._by_prompt(queries), prompts[0].flatten(0, 1).transpose(1, 2))
        width = shared.shape[-1]
        if self._prompt_mask is not None:
            shared.view(-1, kv_heads, *shared.shape[1:]).add_(self._prompt_mask)
        scores = torch.cat((self._by_row(shared, kv_heads), mine), -1).softmax(-1, dtype=torch.float32)
        scores = scores.to(queries.dtype)
        found = torch.bmm(self._by_prompt(scores[..., :width]), prompts[1].flatten(0, 1))
        of_own = torch.bmm(scores[..., width:].flatten(0, 1), own[1].flatten(0, 1))
        return self._by_row(found, kv_heads).add_(of_own.view_as(queries))

    def _by_prompt(self, x: Tensor) -> Tensor:
        """Turn [R,H,G,*] into [P*H,M*G,*], where the M rows of a prompt are next to each other."""
        grouped = x[self._slots] if self._ragged else x
        _, heads, queries, size = grouped.shape
        grouped = grouped.reshape(len(self.lengths), -1, heads, queries, size).transpose(1, 2)
        return grouped.reshape(len(self.lengths) * heads, -1, size)

    def _by_row(self, x: Tensor, kv_heads: int) -> Tensor:
        """Undo `_by_prompt`."""
        prompts, size = len(self.lengths), x.shape[-1]
        grouped = x.view(prompts, kv_heads, self._most, -1, size).transpose(1, 2)
        grouped = grouped.reshape(prompts * self._most, kv_heads, -1, size)
        return grouped[self._places] if self._ragged else grouped

    def _index(self) -> None:
        """Note where the rows of each prompt are, after rows or prompts have changed."""
        members: list[list[int]] = [[] for _ in self.lengths]
        for row, prompt in enumerate(self.of_row):
            members[prompt].append(row)
        self._most = max(map(len, members), default=0)
        slots = [row for mine in members for row in (*mine, *[0] * (self._most - len(mine)))]
        places = {row: p * self._most + k for p, mine in enumerate(members) for k, row in enumerate(mine)}
        self._ragged = slots != list(range(self.rows))
        self._slots = torch.tensor(slots, dtype=torch.long, device=self.device)
        self._places = torch.tensor([places[r] for r in range(self.rows)], dtype=torch.long, device=self.device)
        width = max(self.lengths, default=0)
        columns = torch.arange(width, device=self.device)
        before = torch.tensor([width - n for n in self.lengths], device=self.device)
        even = min(self.lengths, default=0) == width
        self._prompt_mask = None if even else self._additive(columns[None] >= before[:, None])[:, None, None]

    def _add_prompts(self, layer: _Layer, keys: Tensor, values: Tensor) -> None:
        old = layer.prompts or (keys[:0], values[:0])
        width = max(old[0].shape[2], keys.shape[2])
        layer.prompts = tuple(
            torch.cat([torch.nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in pair])
            for pair in zip(old, (keys, values), strict=True)
        )

    def _reserve(self, layer: _Layer, like: Tensor) -> None:
        """Make room for all rows up to column `end`."""
        if not layer.rows:
            layer.rows = (like.new_zeros(0, like.shape[1], 0, like.shape[2]),) * 2
        have_rows, heads, have_columns, size = layer.rows[0].shape
        if self.rows <= have_rows and self.end <= have_columns:
            return
        columns = max(self.end + GROWTH, have_columns * 5 // 4) if self.end > have_columns else have_columns
        grown = tuple(x.new_zeros(max(self.rows, have_rows), heads, columns, size) for x in layer.rows)
        for new, old in zip(grown, layer.rows, strict=True):
            new[:have_rows, :, :have_columns] = old
        layer.rows = grown

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self._kind(), device=self.device).masked_fill_(~visible, -torch.inf)

    def _normalized(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * scale).to(x.dtype)

    def _kind(self) -> torch.dtype:
        with self.autocast():
            if torch.is_autocast_enabled(self.device.type):
                return torch.get_autocast_dtype(self.device.type)
        kind: torch.dtype = self.model.model.norm.weight.dtype
        return kind
