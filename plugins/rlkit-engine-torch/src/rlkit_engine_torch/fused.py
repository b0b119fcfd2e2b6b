"""Decoding through fused copies of a model's weights, with one copy of each prompt's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from rlkit.models.vision import RowMedia
from rlkit.ops.attention import Layout, Scoring, Span, packed_attention, token_indices, widened
from rlkit.ops.ragged import by_sdpa
from rlkit.ops.routes import Routers
from rlkit_engine_torch.blocks import Attend, FusedModel
from rlkit_engine_torch.decoder import SPARE
from rlkit_engine_torch.prefixes import Prefix
from rlkit_engine_torch.row_attention import RowAttention, additive_mask

if TYPE_CHECKING:
    from rlkit.models.recurrent import StateLayer
    from rlkit_engine_torch.recording import Record

GROWTH = 16
"""The least number of columns by which the cache grows; otherwise it grows by half."""


class _LayerCache:
    """One layer's keys and values: of prompts [2,P,H,W,D], and of rows' own tokens [2,R,H,C,D], with room for more."""

    def __init__(self) -> None:
        self.prompts: Tensor | None = None
        self.rows: Tensor | None = None
        self.width = 0
        """The number of columns of prompts that have been written."""

    def add_prompts(self, before: int, count: int, width: int, like: Tensor) -> Tensor:
        """Return the place of keys and values [2,count,H,width,D] of more prompts, all of it to be written.

        Args:
            before: The number of prompts to keep.
            count: The number of new ones.
            width: The tokens of the longest new one.
            like: [...,H,n,D] of the same dtype.
        """
        self.width = max(self.width, width) if before else width
        heads, _, size = like.shape[-3:]
        old = like.new_zeros(2, 0, heads, 0, size) if self.prompts is None else self.prompts
        _, capacity, _, columns, _ = old.shape
        if before + count <= capacity and width <= columns:
            old[:, before : before + count, :, width:] = 0
            self.prompts = old
        else:
            rows = capacity if before + count <= capacity else max(before + count, capacity * 3 // 2)
            wider = columns if width <= columns else max(width, columns * 5 // 4)
            self.prompts = like.new_zeros(2, rows, heads, wider, size)
            self.prompts[:, :before, :, :columns] = old[:, :before]
        return self.prompts[:, before : before + count, :, :width]

    def add_rows(self, new: Tensor, before: int, width: int) -> None:
        """Append rows [2,R,H,C,D] after the `before` rows there are, which use `width` columns."""
        _, rows, _, columns, _ = new.shape
        self.reserve(before + rows, max(columns, width))[:, before : before + rows, :, :columns] = new

    def clear_rows(self, before: int, count: int) -> None:
        """Clear the columns of new rows: masks would not hide an earlier row's keys and values that are not finite."""
        if self.rows is not None:
            self.rows[:, before : before + count] = 0

    def reserve(self, rows: int, columns: int) -> Tensor:
        """Return the buffer of rows' own tokens, grown if necessary; rows beyond `rows` may be dropped."""
        assert self.prompts is not None
        _, _, heads, _, size = self.prompts.shape
        row_capacity, column_capacity = (0, 0) if self.rows is None else (self.rows.shape[1], self.rows.shape[3])
        if self.rows is None or rows > row_capacity or columns > column_capacity:
            wider = columns > column_capacity
            new_columns = max(columns + GROWTH, column_capacity * 3 // 2) if wider else column_capacity
            grown = self.prompts.new_zeros(2, rows if wider else max(rows, row_capacity), heads, new_columns, size)
            if self.rows is not None:
                grown[:, :row_capacity, :, :column_capacity] = self.rows[:, : grown.shape[1]]
            self.rows = grown
        return self.rows

    def move(self, copy: Callable[[Tensor], None], rows: int, width: int) -> None:
        """Move rows, the first `width` columns of them, by a function of `row_copies`."""
        if self.rows is not None:
            copy(self.reserve(rows, 0)[:, :, :, :width])

    def move_prompts(self, copy: Callable[[Tensor], None]) -> None:
        """Move prompts, and what pads them, by a function of `row_copies`."""
        assert self.prompts is not None
        copy(self.prompts[:, :, :, : self.width])


def row_copies(moved: Sequence[tuple[int, int]], device: torch.device) -> Callable[[Tensor], None]:
    """Return a function that copies rows of a tensor [2,R,H,C,D], for each pair (new, old) the old to the new index."""
    to, old = torch.tensor(moved, device=device).unbind(-1)
    in_turn = device.type == "cpu" and not {new for new, _ in moved} & {before for _, before in moved}

    def copy(columns: Tensor) -> None:
        if in_turn:  # several times as fast as by indices
            for new, before in moved:
                columns[:, new] = columns[:, before]
        else:
            columns[:, to] = columns[:, old]

    return copy


class _Admission:
    """One packed sequence of new tokens: each prompt, but for its first `cached` ones, and its rows' own tokens."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        own: Sequence[Sequence[int]],
        cached: Sequence[int],
        device: torch.device,
    ) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.prompts: list[Span] = []
        """The span of each prompt's new tokens."""
        self.rows: list[Span] = []
        """The span of each row's own tokens."""
        self.lasts: list[int] = []
        """The index of each row's last token."""
        shared = []
        remaining = iter(own or [()] * sum(copies))
        for i, (prompt, count) in enumerate(zip(prompts, copies, strict=True)):
            skipped = cached[i] if cached else 0
            start, end = self._add(prompt[skipped:], skipped)
            self.prompts.append((start, end))
            self.rows += (self._add(tokens, len(prompt)) for tokens in islice(remaining, count))
            self.lasts += (end - 1 if first == last else last - 1 for first, last in self.rows[len(self.lasts) :])
            shared.append((start, end, len(self.tokens)))
        segments = sorted(span for span in (*self.prompts, *self.rows) if span[0] < span[1])
        self.layout = Layout(segments, [s for s in shared if s[1] < s[2]], device)

    def _add(self, tokens: Sequence[int], position: int) -> Span:
        start = len(self.tokens)
        self.tokens += tokens
        self.positions += range(position, position + len(tokens))
        return start, len(self.tokens)


class FusedDecoder:
    """Decodes rows as `Decoder` does, without the model's modules and in fewer passes over memory.

    The copies of the weights, adapters merged, have autocast's dtype if it is enabled. They are renewed at the first
    pass after `refresh`. Rows attend to one copy of the prompt that they share, and to their own tokens, of which row
    `r` has `end - starts[r]`.

    Args:
        model: A causal language model that `FusedModel` supports, including its adapters.
        autocast: Returns the precision context.
    """

    spare = SPARE
    refill = 0.0
    resumes = True
    few_sizes = True
    record: Record | None = None
    continues = True
    recurrent = False
    routers: Routers | None = None
    recorded: list[Tensor] | None = None

    def __init__(self, model: Any, autocast: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self.model = model
        self.autocast = autocast
        self.config = self.model.config.get_text_config()
        self.device = next(model.parameters()).device
        self.release()
        self.refresh()

    def release(self) -> None:
        """Drop all rows and release their memory."""
        self.end = 0
        self.starts: list[int] = []
        self.row_prompts: list[int] = []
        """The index of each row's prompt."""
        self.lengths: list[int] = []
        """The number of tokens of each prompt."""
        self.layers = [_LayerCache() for _ in range(self.config.num_hidden_layers)]
        self._indexed = False

    def refresh(self) -> None:
        """Drop the copies of the weights: the weights have changed, or nothing is decoded for now."""
        self._fused: FusedModel | None = None

    def health(self) -> dict[str, float]:
        return {"fused": 1.0}

    @property
    def rows(self) -> int:
        """The number of rows."""
        return len(self.starts)

    @property
    def width(self) -> int:
        """The number of own tokens of the longest row."""
        return self.end - min(self.starts, default=self.end)

    def positions(self) -> Tensor:
        """Return the position [R] i64 of each row's next token."""
        self._index_rows()
        return self._offsets + self.end

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

        `own` holds each row's own tokens after its prompt, any number of them; if it is empty, no row has any. If the
        prompts have `prefixes`, only what comes after these is run, and no row has tokens of its own.
        """
        new = _Admission(prompts, copies, own, [prefix.length for prefix in prefixes], self.device)
        for layer in self.layers:
            layer.clear_rows(self.rows, len(new.rows))
        model = self._model()
        tokens, positions = (torch.tensor(x, device=self.device) for x in (new.tokens, new.positions))
        attend = _attention_after(self, new, prefixes, positions) if prefixes else self._prefill(new)
        hidden = model(tokens, positions, max(new.positions) + 1, attend)
        lasts = {last: i for i, last in enumerate(sorted(set(new.lasts)))}
        logits = model.logits(hidden[list(lasts)])[[lasts[last] for last in new.lasts]]
        first = len(self.lengths)
        self.lengths += map(len, prompts)
        self.row_prompts += [first + i for i, n in enumerate(copies) for _ in range(n)]
        self.starts += [self.end - (end - start) for start, end in new.rows]
        self._indexed = False
        return logits

    def _prefill(self, new: _Admission) -> Attend:
        """Return the attention of a pass over new rows, which also adds their keys and values to the cache."""
        heads = self.config.num_attention_heads
        prompt_indices, is_real = token_indices(new.prompts, self.device)
        real = () if new.layout.shared else is_real.nonzero(as_tuple=True)  # once for all layers: the host waits
        row_indices, is_own = token_indices(new.rows, self.device)
        packed = packed_attention if self.device.type == "cpu" else by_sdpa

        def attend(index: int, queries: Tensor, projected: Tensor) -> Tensor:
            keys_values = projected.transpose(0, 1)
            prompts = keys_values[:, prompt_indices].transpose(2, 3)
            cached = _as_cached(prompts)
            self.layers[index].add_prompts(len(self.lengths), cached.shape[1], cached.shape[3], cached).copy_(cached)
            if not new.layout.shared:
                q, (k, v) = queries[prompt_indices].transpose(1, 2), prompts
                k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0).transpose(1, 2)[real]
            rows = _as_cached(keys_values[:, row_indices].transpose(2, 3))
            rows.masked_fill_(~is_own[:, None, :, None], 0)  # of a row without own tokens it is another's last one
            self.layers[index].add_rows(rows, self.rows, self.width)
            return packed(queries, keys_values[0], keys_values[1], Scoring(1.0), new.layout)

        return attend

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token [R] to each row and return the next logits [R,V]."""
        positions = self.positions()
        last = None if self._equally_long else self._negative_starts + self.end
        self.end += 1
        return self._pass(tokens, positions, last, self.width)

    def _pass(self, tokens: Tensor, positions: Tensor, last: Tensor | None, width: int) -> Tensor:
        """Add a token to each row; return the next logits [R,V].

        Args:
            tokens: [R] i64.
            positions: [R] i64, counted from the beginning of each row's prompt.
            last: [R] i64, the column of each row's token; None for the last of `width` columns in all rows.
            width: The number of columns that rows attend to.
        """
        rows, mask = self.rows, None
        if last is not None:
            mask = additive_mask(torch.arange(width, device=self.device) <= last[:, None], _dtype(self))[:, None]

        def attend(index: int, queries: Tensor, keys_values: Tensor) -> Tensor:
            layer = self.layers[index]
            new = _as_cached(keys_values)
            own = layer.reserve(rows, width)
            if last is None:
                own[:, :rows, :, width - 1] = new.transpose(0, 1)
            else:
                own[:, self._row_indices, :, last] = new
            assert layer.prompts is not None
            prompts = layer.prompts[:, : len(self.lengths), :, : max(self.lengths)]
            return self._attention(queries, prompts, own[:, :rows, :, :width], mask)

        model = self._model()
        return model.logits(model(tokens, positions, max(self.lengths) + width, attend))

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order; drop all others, and the prompts that no row uses.

        Only rows whose index changes are copied.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        used = sorted({self.row_prompts[r] for r in rows})
        gaps = sorted(set(range(len(used))).difference(used))
        moved_prompts = list(zip(gaps, used[len(used) - len(gaps) :], strict=True))
        first = min((self.starts[r] for r in rows), default=self.end)
        if moved and self.width:
            copy = row_copies(moved, self.device)
            for layer in self.layers:
                layer.move(copy, self.rows, self.width)
        if moved_prompts:
            copy = row_copies(moved_prompts, self.device)
            for layer in self.layers:
                layer.move_prompts(copy)
        new_index = {prompt: prompt for prompt in used} | {old: new for new, old in moved_prompts}
        lengths = {new_index[prompt]: self.lengths[prompt] for prompt in used}
        self.row_prompts = [new_index[self.row_prompts[r]] for r in rows]
        self.starts = [self.starts[r] - first for r in rows]
        self.lengths = [lengths[prompt] for prompt in range(len(used))]
        self.end -= first
        self._indexed = False

    def states(self, row: int) -> Sequence[StateLayer]:
        return ()

    @torch.inference_mode()
    def keys_values(self, row: int, start: int, end: int) -> Tensor:
        """Return a copy of the keys and values [L,2,H,n,D] of a row's tokens from `start` to `end`."""
        prompt = self.row_prompts[row]
        length = self.lengths[prompt]
        parts = []
        if start < length:
            parts.append([layer.prompts[:, prompt, :, start : min(end, length)] for layer in self.layers])  # type: ignore[index]
        if end > length:
            own = slice(max(start - length, 0), end - length)
            parts.append([layer.rows[:, row, :, own] for layer in self.layers])  # type: ignore[index]
        return torch.cat([torch.stack(part) for part in parts], 3)

    def _model(self) -> FusedModel:
        if self._fused is None:
            self._fused = FusedModel(self.model, _dtype(self))
        return self._fused

    def _index_rows(self) -> None:
        """Update what depends on the rows and their prompts, if either has changed."""
        if self._indexed:
            return
        self._indexed, device = True, self.device
        self._attention = RowAttention(self.row_prompts, self.lengths, self.config, _dtype(self), device)
        starts = torch.tensor(self.starts, dtype=torch.long, device=device)
        prompt_lengths = torch.tensor([self.lengths[p] for p in self.row_prompts], dtype=torch.long, device=device)
        self._offsets = prompt_lengths - starts
        self._equally_long = len(set(self.starts)) < 2
        self._negative_starts = -starts
        self._row_indices = torch.arange(self.rows, device=device)


def _attention_after(decoder: FusedDecoder, new: _Admission, prefixes: Sequence[Prefix], positions: Tensor) -> Attend:
    """Return the attention of a pass over what comes after prefixes, which adds both to the decoder's cache.

    Args:
        decoder: Whose prompts these become.
        new: The tokens of the pass.
        prefixes: Of each prompt.
        positions: [N] i64, of the tokens.
    """
    device, heads, before = decoder.device, decoder.config.num_attention_heads, len(decoder.lengths)
    indices, is_real = token_indices(new.prompts, device)  # [P,Q]
    real = is_real.nonzero(as_tuple=True)
    width, like, on_cpu = max(new.positions) + 1, prefixes[0].chunks[0], device.type == "cpu"
    visible = torch.arange(width, device=device) <= positions[indices][:, None, :, None]  # [P,1,Q,W]
    mask = additive_mask(visible, like.dtype)

    def attend(index: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        cache = decoder.layers[index].add_prompts(before, len(prefixes), width, like)
        for i, prefix in enumerate(prefixes):
            prefix.write(cache[:, i], index)
            cache[:, i, :, prefix.length :] = 0
        cache[:, real[0], :, positions] = _as_cached(keys_values)
        # a GPU's kernels take no mask where heads share keys
        k, v = cache if on_cpu else (x.repeat_interleave(heads // x.shape[1], 1) for x in cache)
        q = queries[indices].transpose(1, 2).to(k.dtype)
        output = scaled_dot_product_attention(q, k, v, mask, scale=1.0, enable_gqa=on_cpu)
        return output.transpose(1, 2)[real].to(queries.dtype)

    return attend


def _dtype(decoder: FusedDecoder) -> torch.dtype:
    """Return the dtype of the copies of the weights."""
    with decoder.autocast():
        if torch.is_autocast_enabled(decoder.device.type):
            return torch.get_autocast_dtype(decoder.device.type)
    dtype: torch.dtype = decoder.model.model.norm.weight.dtype
    return dtype


def _as_cached(keys_values: Tensor) -> Tensor:
    """Return keys and values in the dtype of the cache, which is not below float32 on a CPU.

    There each step would convert all keys for its scores, and oneDNN would compile 16-bit products of values for each
    number of columns.
    """
    return widened(keys_values) if keys_values.device.type == "cpu" else keys_values
