"""Decoding through fused copies of a model's weights, with one copy of each prompt's keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from rlkit.engines.torch.blocks import FusedModel
from rlkit.engines.torch.decoder import SPARE
from rlkit.ops.attention import Layout, packed_attention, token_indices
from rlkit.ops.ragged import Span, by_sdpa

GROWTH = 16
"""Columns by which the cache grows at least; it grows by half."""


class _Layer:
    """One layer's keys and values: of prompts [2,P,H,W,D], and of what rows have sampled [2,R,H,C,D]."""

    def __init__(self) -> None:
        self.prompts: Tensor | None = None
        self.rows: Tensor | None = None

    def add_prompts(self, new: Tensor) -> None:
        """Append prompts [2,P,H,W,D]."""
        old = new[:, :0] if self.prompts is None else self.prompts
        width = max(old.shape[3], new.shape[3])
        self.prompts = torch.cat([pad(x, (0, 0, 0, width - x.shape[3])) for x in (old, new)], 1)

    def add_rows(self, new: Tensor, before: int, width: int) -> None:
        """Append what rows [2,R,H,C,D] have sampled to the first so many, which use as many columns as `width`."""
        _, rows, _, columns, _ = new.shape
        self.room(before + rows, max(columns, width))[:, before : before + rows, :, :columns] = new

    def room(self, rows: int, columns: int) -> Tensor:
        """Return the buffer for what rows sample, with room for so many; rows beyond them may be dropped."""
        assert self.prompts is not None
        _, _, heads, _, size = self.prompts.shape
        have_rows, have_columns = (0, 0) if self.rows is None else (self.rows.shape[1], self.rows.shape[3])
        if self.rows is None or rows > have_rows or columns > have_columns:
            wider = columns > have_columns
            most = max(columns + GROWTH, have_columns * 3 // 2) if wider else have_columns
            grown = self.prompts.new_zeros(2, rows if wider else max(rows, have_rows), heads, most, size)
            if self.rows is not None:
                grown[:, :have_rows, :, :have_columns] = self.rows[:, : grown.shape[1]]
            self.rows = grown
        return self.rows

    def move(self, to: Tensor, old: Tensor, rows: int, width: int) -> None:
        """Copy the first columns of some of the rows to others."""
        if self.rows is not None:
            columns = self.room(rows, 0)[:, :, :, :width]
            columns[:, to] = columns[:, old]


class _Part(NamedTuple):
    """What queries find among some of their keys.

    `found` [B,Q,D] sums values by the exponentials of scores less the `highest` [B,Q,1], whose own sum is `total`
    [B,Q,1].
    """

    found: Tensor
    total: Tensor
    highest: Tensor

    @classmethod
    def of(cls, scores: Tensor, values: Tensor) -> _Part:
        """Return it for scores [B,Q,K] and values [B,K,D]."""
        highest = scores.amax(-1, keepdim=True).float()
        weights = torch.sub(scores, highest).exp_()
        return cls(torch.bmm(weights.to(values.dtype), values), weights.sum(-1, keepdim=True), highest)

    def joined(self, other: _Part) -> Tensor:
        """Return the mean of values [B,Q,D] over the keys of both."""
        highest = torch.maximum(self.highest, other.highest)
        one, two = (self.highest - highest).exp_(), (other.highest - highest).exp_()
        total = (self.total * one).addcmul_(other.total, two)
        return (self.found * one).addcmul_(other.found, two).div_(total).to(self.found.dtype)


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    """Return the products [B,Q,K] of queries [B,Q,D] and keys [B,K,D], in float32 where these are narrower.

    Biases of keys may be above 100, and scores above 1,000: bfloat16 would round them by up to 4.
    """
    keys = keys.transpose(1, 2)
    if queries.dtype not in {torch.bfloat16, torch.float16}:
        return torch.bmm(queries, keys)
    if queries.is_cuda:
        return torch.bmm(queries, keys, out_dtype=torch.float32)
    return torch.bmm(queries.float(), keys.float())


class _Admission:
    """The tokens of prompts in one sequence, and after each of them those that its rows have of their own."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        copies: Sequence[int],
        own: Sequence[Sequence[int]],
        device: torch.device,
    ) -> None:
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.prompts: list[Span] = []
        self.rows: list[Span] = []
        """Where each prompt begins and ends, and what each row has of its own."""
        self.lasts: list[int] = []
        """The last token of each row."""
        shared, rest = [], iter(own or [()] * sum(copies))
        for prompt, count in zip(prompts, copies, strict=True):
            start, end = self._add(prompt, 0)
            self.prompts.append((start, end))
            self.rows += (self._add(tokens, len(prompt)) for tokens in islice(rest, count))
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

    The copies of the weights, adapters merged, are in autocast's type if there is one. They are made again at the first
    pass after `refresh`, and where a prompt is admitted after the model's own weights were written. Rows attend to one
    copy of the prompt that they share, and to their own tokens, of which row `r` has `end - starts[r]`.

    Args:
        model: A causal language model, its adapters inside, whose blocks `FusedModel` takes.
        autocast: Makes the precision context.
    """

    spare = SPARE
    resumes = True

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
        self._fused: FusedModel | None = None

    def health(self) -> dict[str, float]:
        return {"fused": 1.0}

    @property
    def rows(self) -> int:
        """How many rows there are."""
        return len(self.starts)

    @property
    def width(self) -> int:
        """How many tokens the oldest row has sampled."""
        return self.end - min(self.starts, default=self.end)

    def positions(self) -> Tensor:
        """Return the position [R] i64 of the token that comes next in each row."""
        return self._offsets + self.end

    @torch.inference_mode()
    def admit(
        self, prompts: Sequence[Sequence[int]], copies: Sequence[int], own: Sequence[Sequence[int]] = ()
    ) -> Tensor:
        """Run the prompts, add `copies[i]` rows for each, in order, and return the rows' next logits [N,V].

        `own` holds the tokens [N,…] that each of these rows has after its prompt, of any number; none has if it is
        empty.
        """
        if self._fused is not None and self._fused.outdated():
            self.refresh()
        new, model = _Admission(prompts, copies, own, self.device), self._model()
        tokens, positions = (torch.tensor(x, device=self.device) for x in (new.tokens, new.positions))
        hidden = model(tokens, positions, max(new.positions) + 1, self._prefill(new))
        lasts = {last: i for i, last in enumerate(sorted(set(new.lasts)))}
        logits = model.logits(hidden[list(lasts)])[[lasts[last] for last in new.lasts]]
        first = len(self.lengths)
        self.lengths += map(len, prompts)
        self.of_row += [first + i for i, n in enumerate(copies) for _ in range(n)]
        self.starts += [self.end - (end - start) for start, end in new.rows]
        self._index()
        return logits

    def _prefill(self, new: _Admission) -> Callable[[int, Tensor], Tensor]:
        """Return what attends in the pass over new rows, and adds their keys and values to those of others."""
        heads = self.config.num_attention_heads
        places, real = token_indices(new.prompts, self.device)
        own = token_indices(new.rows, self.device)[0]
        packed = packed_attention if self.device.type == "cpu" else by_sdpa

        def attend(index: int, found: Tensor) -> Tensor:
            queries, both = found[:, :heads], found[:, heads:].view(len(found), 2, -1, found.shape[-1])
            both = both.transpose(0, 1)
            self.layers[index].add_prompts(prompts := both[:, places].transpose(2, 3))
            if not new.layout.shared:
                q, (k, v) = queries[places].transpose(1, 2), prompts
                k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
                return scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0).transpose(1, 2)[real]
            self.layers[index].add_rows(both[:, own].transpose(2, 3), self.rows, self.width)
            return packed(queries, both[0], both[1], 1.0, new.layout)

        return attend

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Add a token [R] to each row and return the next logits [R,V]."""
        positions = self.positions()
        last = None if self._same_age else self._ages + self.end
        self.end += 1
        return self._pass(tokens, positions, last, self.width)

    def _pass(self, tokens: Tensor, positions: Tensor, last: Tensor | None, width: int) -> Tensor:
        """Run tokens [R] at positions [R]; return their logits [R,V].

        Args:
            tokens: What is added to rows.
            positions: Where in the row, its prompt included.
            last: [R] i64: the column for each row's token; None for the last of `width` in all.
            width: The columns that rows attend to, up to their last.
        """
        rows, heads, mask = self.rows, self.config.num_attention_heads, None
        if last is not None:
            mask = self._additive(torch.arange(width, device=self.device) <= last[:, None])[:, None]

        def attend(index: int, found: Tensor) -> Tensor:
            layer, new = self.layers[index], found[:, heads:].view(rows, 2, -1, found.shape[-1])
            own = layer.room(rows, width)
            if last is None:
                own[:, :rows, :, width - 1] = new.transpose(0, 1)
            else:
                own[:, self._every, :, last] = new
            assert layer.prompts is not None
            return self._attend(found[:, :heads], layer.prompts, own[:, :rows, :, :width], mask)

        model = self._model()
        return model.logits(model(tokens, positions, max(self.lengths) + width, attend))

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; drop all others, and the prompts that no row has any more.

        Only rows whose place changes are copied.
        """
        moved = [(new, old) for new, old in enumerate(rows) if new != old]
        used = sorted({self.of_row[r] for r in rows})
        first = min((self.starts[r] for r in rows), default=self.end)
        if moved and first < self.end:
            to, old = torch.tensor(moved, device=self.device).unbind(-1)
            for layer in self.layers:
                layer.move(to, old, self.rows, self.end - first)
        place = {prompt: i for i, prompt in enumerate(used)}
        lengths = [self.lengths[p] for p in used]
        for layer in self.layers if len(used) < len(self.lengths) else ():
            if layer.prompts is not None:
                layer.prompts = layer.prompts[:, used, :, : max(lengths, default=0)]
        self.of_row = [place[self.of_row[r]] for r in rows]
        self.starts = [self.starts[r] - first for r in rows]
        self.lengths = lengths
        self.end -= first
        self._index()

    def _model(self) -> FusedModel:
        if self._fused is None:
            self._fused = FusedModel(self.model, self._kind())
        return self._fused

    def _attend(self, queries: Tensor, prompts: Tensor, own: Tensor, mask: Tensor | None) -> Tensor:
        """Return what queries [R,heads,D] attend to: keys and values of their prompts, and their own [2,R,H,C,D].

        The two are joined by their sums, so the scores of prompts and rows are never in one tensor.
        """
        rows, heads, size = queries.shape
        keys, values = own.flatten(1, 2)
        by_head = (len(keys), -1, size)
        of_prompt = self._attend_prompts(queries, prompts)
        scores = _scores(queries.reshape(by_head), keys)
        if mask is not None:
            scores.view(rows, -1, scores.shape[-1]).add_(mask)
        of_own = _Part.of(scores, values)
        return of_own.joined(_Part(*(x.view(*by_head[:2], x.shape[-1]) for x in of_prompt))).view(rows, heads, size)

    def _attend_prompts(self, queries: Tensor, prompts: Tensor) -> _Part:
        """Return what queries [R,heads,D] find in their prompts, as `_Part` of [R*heads,...]."""
        size = queries.shape[-1]
        keys, values = prompts.flatten(1, 2)
        by_prompt = queries.reshape(-1, size).index_select(0, self._slots).view(len(keys), -1, size)
        scores = _scores(by_prompt, keys)
        if self._prompt_mask is not None:
            scores.view(len(self.lengths), -1, scores.shape[-1]).add_(self._prompt_mask)
        return _Part(*(x.flatten(0, 1).index_select(0, self._places) for x in _Part.of(scores, values)))

    def _index(self) -> None:
        """Note where the heads of each prompt's rows are, and the ages, after rows or prompts have changed."""
        device, kv_heads = self.device, self.config.num_key_value_heads
        queries = self.config.num_attention_heads // kv_heads
        members: list[list[int]] = [[] for _ in self.lengths]
        of_row = []
        for row, prompt in enumerate(self.of_row):
            of_row.append((prompt, len(members[prompt])))
            members[prompt].append(row)
        most = max(map(len, members), default=0)
        padded = torch.tensor([mine + [0] * (most - len(mine)) for mine in members], dtype=torch.long, device=device)
        heads = torch.arange(kv_heads * queries, device=device).view(kv_heads, 1, queries)
        self._slots = (padded.view(len(members), 1, most, 1) * kv_heads * queries + heads).flatten()
        prompts, slots = torch.tensor(of_row, dtype=torch.long, device=device).view(-1, 2).T[..., None, None]
        group = torch.arange(kv_heads, device=device)[:, None]
        self._places = (
            ((prompts * kv_heads + group) * most + slots) * queries + torch.arange(queries, device=device)
        ).flatten()
        lengths = torch.tensor(self.lengths, dtype=torch.long, device=device)
        width = max(self.lengths, default=0)
        even = min(self.lengths, default=0) == width
        columns = torch.arange(width, device=device)
        self._prompt_mask = None if even else self._additive(columns < lengths[:, None])[:, None]
        starts = torch.tensor(self.starts, dtype=torch.long, device=device)
        self._offsets = lengths[prompts.flatten()] - starts
        self._same_age, self._ages = len(set(self.starts)) < 2, -starts
        self._every = torch.arange(self.rows, device=device)

    def _additive(self, visible: Tensor) -> Tensor:
        return torch.zeros(visible.shape, dtype=self._kind(), device=self.device).masked_fill_(~visible, -torch.inf)

    def _kind(self) -> torch.dtype:
        with self.autocast():
            if torch.is_autocast_enabled(self.device.type):
                return torch.get_autocast_dtype(self.device.type)
        kind: torch.dtype = self.model.model.norm.weight.dtype
        return kind
