"""Decoding with a model's key-value cache: rows of different lengths, one token per step."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, groupby, pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from rlkit.models.attention import layer_types
from rlkit.models.packing import masked_attention
from rlkit.models.recurrent import StateLayer, cache_name
from rlkit.models.routes import Routing, routers_of
from rlkit.models.vision import RowMedia, backbone_of, picture_inputs, rotary_positions
from rlkit.ops.attention import equally_wide
from rlkit.ops.routes import Routers
from rlkit_engine_torch.cache import ATTENTION, WITH_KEYS, CacheLayer, attention_masks, layer_windows, prefix_columns
from rlkit_engine_torch.prefixes import Prefix

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM
    from rlkit.types import Media
    from rlkit_engine_torch.recording import Record

GROWTH = 64
"""The least number of columns by which the cache grows."""

SPARE = 1 / 32
"""`spare` on a CPU: in a small model, dropping a row costs as much as its share of a step."""


class AnyDecoder(Protocol):
    """Decodes rows: `admit` adds rows, `step` adds a token to each, `keep` drops rows."""

    spare: float
    """The share of finished rows, which are still computed, from which on they are dropped."""

    refill: float
    """The share of finished rows from which on waiting rows replace them; fewer waiting rows join later, together."""

    model: CausalLM

    device: torch.device

    resumes: bool
    """Whether rows may be admitted with their own tokens after a shared prompt."""

    continues: bool
    """Whether prompts may be admitted with prefixes, from `keys_values` and `states` of the same weights."""

    recurrent: bool
    """Whether layers have states, which exist after the last token alone and take no padding."""

    routers: Routers | None
    """Those of a mixture of experts, whose choices the decoder can record."""

    recorded: list[Tensor] | None
    """For each pass of a mixture, the routes [R,T,L,K] of its tokens, padding on the left included; None for none."""

    few_sizes: bool
    """Whether finished rows are dropped down to few numbers of rows: see `rounded_rows`."""

    record: Record | None
    """Records a step's kernels: see `Graph`. None where steps are not recorded."""

    @property
    def rows(self) -> int: ...

    def positions(self) -> Tensor: ...

    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        own: Sequence[Sequence[int]] = (),
        media: RowMedia = (),
        prefixes: Sequence[Prefix] = (),
    ) -> Tensor: ...

    def step(self, tokens: Tensor) -> Tensor: ...

    def keep(self, rows: Sequence[int]) -> None: ...

    def keys_values(self, row: int, start: int, end: int) -> Tensor: ...

    def states(self, row: int) -> Sequence[StateLayer]: ...

    def refresh(self) -> None: ...

    def release(self) -> None: ...

    def health(self) -> dict[str, float]:
        """Return gauges: `fused` is 1 if weights are fused, `recorded` the share of steps that were replayed."""
        ...


class Decoder:
    """Decodes rows on a preallocated cache.

    All rows end at column `end`; row `r` begins at `starts[r]`, and the columns before it are masked.

    Args:
        model: A causal language model with a plain key-value cache; see `probe.why_not`.
        autocast: Returns the precision context of a forward pass.
        context: The largest number of tokens of a row that is not finished.
    """

    spare = SPARE
    refill = 0.0
    resumes = False
    few_sizes = False
    record: Record | None = None
    continues = True

    def __init__(
        self,
        model: CausalLM,
        autocast: Callable[[], AbstractContextManager[None]] = nullcontext,
        context: int = sys.maxsize,
    ) -> None:
        self.model = model
        self.autocast = autocast
        self.context = context
        self.config = model.config.get_text_config()
        self.device = next(model.parameters()).device
        self.rows: int
        self.end: int
        self.starts: list[int]
        self.offsets: list[int]
        """What to add to the index of a row's next token, for its position."""
        self.layers: list[CacheLayer]
        kinds = layer_types(self.config)
        self.recurrent = bool(set(kinds) - ATTENTION)
        self._with_keys = [i for i, kind in enumerate(kinds) if kind in WITH_KEYS]
        """The layers that have keys and values."""
        self.release()
        parameters = inspect.signature(model.forward).parameters
        self._last_only = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._cache_name = cache_name(model.forward)
        self.routers = routers_of(backbone_of(model))
        self.recorded: list[Tensor] | None = None

    @property
    def first(self) -> int:
        """The first column that any row uses."""
        return min(self.starts, default=0)

    def positions(self) -> Tensor:
        """Return the position [R] i64 of each row's next token, at most the context's last.

        Only finished rows would be beyond it, where a model may have no positions, or change the rotations of all rows.
        """
        starts, offsets = (torch.tensor(x, device=self.device) for x in (self.starts, self.offsets))
        return (self.end - starts + offsets).clamp(max=self.context - 1)

    @torch.inference_mode()
    def admit(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        own: Sequence[Sequence[int]] = (),
        media: RowMedia = (),
        prefixes: Sequence[Prefix] = (),
    ) -> Tensor:
        """Run the prompts, add `copies[i]` rows for each, in order, and return the rows' next logits [N,V].

        If they have `prefixes`, only what comes after these is run: the last columns, as many as the longest needs.
        """
        assert not any(own)
        if any(media) and not prefixes:
            each = zip(prompts, copies, media, strict=True)
            return torch.cat([self._admit_one(prompt, count, pictures) for prompt, count, pictures in each])
        if any(media) and len(prompts) > 1:  # together, columns with pictures would be run again
            prompt_rows = zip(prompts, copies, media, prefixes, strict=True)
            return torch.cat([self.admit([row[0]], [row[1]], (), [row[2]], [row[3]]) for row in prompt_rows])
        new = [len(prompt) - (prefix.length if prefix else 0) for prompt, prefix in zip_longest(prompts, prefixes)]
        if self.recurrent and len(set(new)) > 1:
            ends = accumulate((len(list(rows)) for _, rows in groupby(new)), initial=0)
            parts = [slice(*bounds) for bounds in pairwise(ends)]
            return torch.cat([self.admit(prompts[i], copies[i], (), (), prefixes[i]) for i in parts])
        width = max(map(len, prompts))
        begins = [width - len(prompt) for prompt in prompts]
        cached = min((begin + prefix.length for begin, prefix in zip(begins, prefixes, strict=False)), default=0)
        tokens = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt, begin in zip(tokens, prompts, begins, strict=True):
            row[begin:] = torch.tensor(prompt)
        starts = torch.tensor(begins, device=self.device)
        columns = torch.arange(width, device=self.device)
        queries = columns[cached:]
        visible = (columns[None, None] >= starts[:, None, None]) & (queries[None, :, None] >= columns[None, None])
        visible = visible | (queries[:, None] == columns)
        offsets = [_offset(self.model, prompt, pictures) for prompt, pictures in zip_longest(prompts, media)]
        positions = (queries - starts[:, None]).clamp(min=0) + torch.tensor(offsets, device=self.device)[:, None]
        layers = self._new_layers(None)
        for index, columns_before in zip(self._with_keys, prefix_columns(prefixes, begins, cached), strict=False):
            layers[index].prefix = columns_before
        for prefix in prefixes:
            for layer, states in zip(layers, prefix.states, strict=False):
                layer.add_rows(states, torch.tensor([0], device=self.device))
        logits = self._forward(tokens[:, cached:].to(self.device), visible, positions, Cache(layers=list(layers)))
        repeats = torch.tensor(copies, device=self.device)
        rows = [i for i, count in enumerate(copies) for _ in range(count)]
        self._append(layers, rows, width, [begins[i] for i in rows], [offsets[i] for i in rows])
        return logits.repeat_interleave(repeats, dim=0)

    def _admit_one(self, prompt: Sequence[int], copies: int, media: Media | None) -> Tensor:
        """Run a prompt alone: the model makes its own mask, in which pictures may be seen in both directions."""
        backbone = backbone_of(self.model)
        tokens = torch.tensor([prompt], device=self.device)
        inputs = picture_inputs(backbone, tokens, [media])
        layers = self._new_layers(None)
        logits = self._run(tokens, Cache(layers=list(layers)), inputs)
        offset = _position_offset(inputs.get("position_ids"), len(prompt))
        self._append(layers, [0] * copies, len(prompt), [0] * copies, [offset] * copies)
        return logits.expand(copies, -1)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token [R] to each row and return the next logits [R,V]."""
        positions = self.positions()
        self._reserve(self.rows, self.end + 1)
        self.end += 1
        columns = torch.arange(self.first, self.end, device=self.device)
        starts = torch.tensor(self.starts, device=self.device)
        visible = (columns[None] >= starts[:, None])[:, None]
        return self._forward(tokens[:, None], visible, positions[:, None], self.cache)

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, and drop all others."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self.starts = [self.starts[r] for r in rows]
        self.offsets = [self.offsets[r] for r in rows]
        first = self.first
        for layer in self.layers:
            layer.keep_rows(index)
        for buffer in self._buffers() if rows else ():
            buffer[: len(rows), :, first : self.end] = buffer[index, :, first : self.end]
        self.rows = len(rows)
        if not rows:
            self.end = 0

    @torch.inference_mode()
    def keys_values(self, row: int, start: int, end: int) -> Tensor:
        """Return a copy of the keys and values [L,2,H,n,D] of a row's tokens from `start` to `end`."""
        columns = slice(self.starts[row] + start, self.starts[row] + end)
        layers = [self.layers[index] for index in self._with_keys]
        pairs = (equally_wide(x.keys[row, :, columns], x.values[row, :, columns]) for x in layers)
        stacked = [torch.stack(pair) for pair in pairs]
        return torch.stack(stacked) if stacked else torch.empty(0, 2, 0, end - start, 0)

    @torch.inference_mode()
    def states(self, row: int) -> list[StateLayer]:
        """Return copies of the states [1,...] of each layer after a row's last token; none if layers have none."""
        copies = self._new_layers(None) if self.recurrent else []
        for layer, copied in zip(self.layers, copies, strict=False):
            copied.add_rows(layer, torch.tensor([row], device=self.device))
        return list(copies)

    def refresh(self) -> None:
        """Do nothing: the model's own weights are read."""

    def health(self) -> dict[str, float]:
        return {"fused": 0.0}

    def release(self) -> None:
        """Drop all rows and release their memory."""
        self.rows = 0
        self.end = 0
        self.starts = []
        self.offsets = []
        self.layers = self._new_layers(self)
        self.cache = Cache(layers=list(self.layers))

    def _forward(self, tokens: Tensor, visible: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        with masked_attention(self.model):
            mask = attention_masks(self.config, visible)
        return self._run(tokens, cache, {"attention_mask": mask, "position_ids": positions})

    def _run(self, tokens: Tensor, cache: Cache, inputs: Mapping[str, Any]) -> Tensor:
        """Run tokens [R,T], and return the logits [R,V] of the last; record the routes, if they are recorded."""
        routing = None if self.recorded is None or self.routers is None else Routing()
        with self.autocast(), masked_attention(self.model):
            output = self.model(
                input_ids=tokens,
                use_cache=True,
                **{self._cache_name: cache},
                **inputs,
                **self._last_only,
                **({} if routing is None else {"routing": routing}),
            )
        if self.recorded is not None and self.routers is not None and routing is not None:
            routes = routing.recorded(self.routers)
            self.recorded.append(routes.view(*tokens.shape, *routes.shape[1:]))
        logits: Tensor = output.logits[:, -1]
        return logits

    def _new_layers(self, decoder: Decoder | None) -> list[CacheLayer]:
        states = getattr(self.config, "number_of_conv_states", 1)
        return [CacheLayer(decoder, window, states) for window in layer_windows(self.config)]

    def _buffers(self) -> list[Tensor]:
        """Return the keys and values of each layer that has them."""
        return [buffer for layer in self.layers if layer.keys is not None for buffer in (layer.keys, layer.values)]

    def _append(
        self,
        layers: Sequence[CacheLayer],
        rows: Sequence[int],
        width: int,
        starts: Sequence[int],
        offsets: Sequence[int],
    ) -> None:
        """Append rows of a prefill of `width` columns."""
        if width > self.end:
            self._shift(width - self.end)
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for layer, new in zip(self.layers, layers, strict=True):
            layer.add_rows(new, index)
            if layer.keys is None and new.keys is not None:
                layer.keys, layer.values = (x.new_zeros(0, x.shape[1], 0, x.shape[3]) for x in (new.keys, new.values))
        self._reserve(self.rows + len(starts), self.end)
        new_buffers = [x for layer in layers if layer.keys is not None for x in (layer.keys, layer.values)]
        start, total = self.end - width, self.rows + len(rows)
        for buffer, x in zip(self._buffers(), new_buffers, strict=True):
            buffer[self.rows : total, :, start : self.end] = x[index]
            buffer[self.rows : total, :, self.first : start] = 0  # no mask hides a NaN of an earlier row
            buffer[: self.rows, :, start : self.first] = 0
        self.starts += [self.end - width + s for s in starts]
        self.offsets += offsets
        self.rows += len(starts)

    def _shift(self, by: int) -> None:
        """Move all rows to the right, or to the left if `by` is negative."""
        first, end = self.first, self.end
        self.end += by
        self.starts = [s + by for s in self.starts]
        if self.rows:
            self._reserve(self.rows, self.end, shifting=True)
            for buffer in self._buffers():
                buffer[: self.rows, :, first + by : end + by] = buffer[: self.rows, :, first:end].clone()

    def _reserve(self, rows: int, columns: int, shifting: bool = False) -> None:
        """Make room for rows and columns: reclaim columns that no row uses, or grow the cache."""
        buffers = self._buffers()
        if not buffers:
            return
        row_capacity, _, column_capacity, _ = buffers[0].shape
        if rows <= row_capacity and columns <= column_capacity:
            return
        if columns > column_capacity and self.rows and not shifting and 2 * self.first >= column_capacity > GROWTH:
            self._shift(-self.first)
            return
        new_rows, new_columns = row_capacity, column_capacity
        if rows > row_capacity:
            new_rows = max(rows, row_capacity * 5 // 4)
        if columns > column_capacity:
            new_columns = max(columns + GROWTH, column_capacity * 5 // 4)
        for layer in self.layers:
            for name in ("keys", "values") if layer.keys is not None else ():
                old = getattr(layer, name)
                grown = old.new_zeros(new_rows, old.shape[1], new_columns, old.shape[3])
                grown[:row_capacity, :, :column_capacity] = old
                setattr(layer, name, grown)


def _offset(model: CausalLM, prompt: Sequence[int], media: Media | None) -> int:
    """Return the number to add to the index of a token behind a prompt's pictures, for its position."""
    if media is None:
        return 0
    tokens = torch.tensor([prompt], device=next(model.parameters()).device)
    return _position_offset(rotary_positions(backbone_of(model), tokens, [media]), len(prompt))


def _position_offset(positions: Tensor | None, tokens: int) -> int:
    """Return the offset from the index of tokens behind a prompt to their position.

    Args:
        positions: [3,1,T] of the prompt; None for plain ones.
        tokens: Length of the prompt.
    """
    return 0 if positions is None else int(positions.max()) + 1 - tokens
