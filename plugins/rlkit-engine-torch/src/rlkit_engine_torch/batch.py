"""The requests that TorchEngine samples together."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from math import isfinite

import torch
from torch import Tensor

from rlkit.base.errors import EngineError, RolloutError
from rlkit.ops.random import uniform
from rlkit.ops.routes import ROUTES
from rlkit.types import Completion, Media, Request, StopReason
from rlkit_engine_torch.prefixes import Prefix, PrefixCache
from rlkit_engine_torch.recording import Record, Replayed
from rlkit_engine_torch.sampling import Truncation, choose
from rlkit_engine_torch.structure import StructureMatcher, exclude

FILLED = ("stops", "candidates")
"""Columns with a number of ids in each row, then -1."""

GROWTH = 64
"""The least number of tokens by which the memory of a row grows."""

AHEAD = 16
"""Tokens of each row whose random numbers are drawn at once: a draw takes 25 operators, whatever their number."""


@dataclass(eq=False)
class Row:
    """A request in progress."""

    request: Request
    budget: int
    stop_ids: frozenset[int]
    future: asyncio.Future[Completion]
    key: int
    matcher: StructureMatcher | None = None
    weights: int = 0
    """How often the weights had changed when it was admitted."""
    versions: list[tuple[int, int]] = field(default_factory=list)
    """For each version of the weights that sampled tokens: the number of tokens before it, and the version."""
    prompt_routes: Tensor | None = None
    """[n,R,K] of the prompt's tokens from `request.routes_from` on, if they were recorded."""
    completion: Completion | None = None
    interrupted: bool = False
    failure: EngineError | RolloutError | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None

    def finish(self, tokens: list[int], logps: list[float], candidates: list[Sequence[int]], routes: Tensor) -> None:
        """Complete the row with its tokens and their routes [n,R,K]; one whose log-probs are not finite has failed."""
        ends = [count for count, _ in self.versions[1:]] + [len(tokens)]
        versions = [v for (start, v), end in zip(self.versions, ends, strict=True) for _ in range(end - start)]
        self.completion = Completion(tokens, logps, versions, self._stop(tokens), candidates)
        if self.prompt_routes is not None:  # the last token has none: it was not run
            self.completion.fields = {ROUTES: torch.cat((self.prompt_routes, routes.cpu()))}
        if self.matcher is not None:
            self.failure = self.matcher.failure
        if not all(map(isfinite, logps)):
            self.failure = EngineError(
                f"the policy's logits were not finite after {len(tokens) - 1} tokens of a completion: its weights or "
                "activations overflow; lower train.lr, or choose fabric.precision: 32-true"
            )

    def _stop(self, tokens: Sequence[int]) -> StopReason:
        if tokens and tokens[-1] in self.stop_ids:
            return StopReason.STOP
        if len(tokens) < self.budget:  # interrupted, cancelled, or past its deadline
            return StopReason.INTERRUPTED if self.interrupted else StopReason.ERROR
        return StopReason.LENGTH if self.budget == self.request.sampling.max_tokens else StopReason.CONTEXT

    def resolve(self) -> None:
        """Resolve the future with the completion or the failure, unless it was cancelled."""
        assert self.completion is not None
        if self.future.done():
            return
        if self.failure is None:
            self.future.set_result(self.completion)
        else:
            self.future.set_exception(self.failure)


@dataclass
class PrefillGroup:
    """Rows that continue one prompt with its pictures.

    Args:
        prompt: Its ids.
        rows: In the order of their admission.
        tokens: Those of a pass over the prompt, but for its prefix, and the rows' own tokens.
        media: The pictures.
        prefix: The tokens that have been run before; None if there are none.
    """

    prompt: tuple[int, ...]
    rows: list[Row]
    tokens: int
    media: Media | None = None
    prefix: Prefix | None = None


def group_by_prompt(
    rows: Sequence[Row], resumed: bool, max_tokens: int, prefixes: PrefixCache | None = None
) -> list[PrefillGroup]:
    """Group rows by their prompts, in the order of each prompt's first row.

    If `resumed`, tokens that a row without a prefix sampled before are not part of its prompt. A prompt gets another
    group if a pass would otherwise take more than `max_tokens`. Tokens whose routes are recorded are run again.
    """
    groups: list[PrefillGroup] = []
    latest: dict[tuple[object, ...], PrefillGroup] = {}
    for row in rows:
        media = row.request.media
        prefix = None if prefixes is None else prefixes.find(row.request.tokens, media, row.request.routes_from)
        own = row.request.resumed if resumed and prefix is None else 0
        prompt = row.request.tokens[: len(row.request.tokens) - own]
        cached = 0 if prefix is None else prefix.length
        key = (prompt, cached, None if media is None else media.key)
        group = latest.get(key)
        if group is None or (own and group.tokens + own > max_tokens):
            group = latest[key] = PrefillGroup(prompt, [], len(prompt) - cached, media, prefix)
            groups.append(group)
        group.rows.append(row)
        group.tokens += own
    return groups


class DecodeBatch:
    """Rows in the order of their logits, with their sampling options and sampled tokens on the device.

    Args:
        device: That of the logits.
        record: As in `AnyDecoder`.
    """

    def __init__(self, device: torch.device, record: Record | None = None) -> None:
        self.rows: list[Row] = []
        self.cancelled = False
        """Whether a row's future was cancelled since the last call of `sample`."""
        self._device = device
        self._version: int | None = None
        self._longest = 0
        self._columns: dict[str, Tensor] = {}
        self._temperature_is_1 = True
        self._greedy = False
        self._untruncated = True
        self._largest_k = 0
        self._any_structure = False
        self._numbers: list[Tensor] = []
        """The uniform numbers [R] of the rows' next tokens, in reverse order."""
        self._u = torch.empty(0, dtype=torch.float64, device=device)
        """The one [R] of the token that is sampled, at a fixed address."""
        self._replayed = None if record is None else Replayed(record)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last(self) -> Tensor:
        """The last token [R] i64 of each row."""
        return self._columns["last"]

    @torch.inference_mode()
    def add(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        max_stops = max((len(r.stop_ids) for r in (*rows, *self.rows)), default=0)
        options = [row.request.sampling for row in rows]
        self._temperature_is_1 &= all(s.temperature == 1 for s in options)
        self._greedy |= any(s.temperature == 0 for s in options)
        self._untruncated &= not any(s.truncates for s in options)
        self._any_structure |= any(row.matcher is not None for row in rows)
        self._largest_k = max([self._largest_k, *(s.top_k for s in options)])
        new = {
            "key": [row.key for row in rows],
            "temperature": [float(s.temperature) for s in options],
            "top_p": [float(s.top_p) for s in options],
            "top_k": [s.top_k for s in options],
            "min_p": [float(s.min_p) for s in options],
            "stops": [sorted(row.stop_ids) + [-1] * (max_stops - len(row.stop_ids)) for row in rows],
            "budget": [row.budget for row in rows],
            "position": [len(row.request.tokens) for row in rows],
            "count": [0 for _ in rows],
            "last": [0 for _ in rows],
            "alive": [True for _ in rows],
        }
        columns = {name: torch.tensor(values, device=self._device) for name, values in new.items()}
        columns["stops"] = columns["stops"].view(len(rows), max_stops).long()
        columns["tokens"] = torch.zeros(len(rows), 0, dtype=torch.long, device=self._device)
        columns["logps"] = torch.zeros(len(rows), 0, device=self._device)
        columns["candidates"] = torch.zeros(len(rows), 0, self._largest_k, dtype=torch.int32, device=self._device)
        like = next((r.prompt_routes for r in rows if r.prompt_routes is not None), torch.empty(0, 0, 0).byte())
        columns["routes"] = torch.zeros(len(rows), 0, *like.shape[1:], dtype=like.dtype, device=self._device)
        for name, column in columns.items():
            old = self._columns.get(name, column[:0])
            self._columns[name] = torch.cat(_equally_wide(old, column, -1 if name in FILLED else 0))
        self.rows += rows
        self._numbers.clear()
        self._version = None

    @property
    def records_routes(self) -> bool:
        """Whether the routes of a row are recorded."""
        return any(row.prompt_routes is not None for row in self.rows)

    @torch.inference_mode()
    def add_routes(self, routes: Tensor) -> None:
        """Add the routes [R,L,K] of each row's last token."""
        rows = torch.arange(len(self.rows), device=self._device)
        self._columns["routes"][rows, self._columns["count"] - 1] = routes

    @torch.inference_mode()
    def sample(self, logits: Tensor, version: int, first: int = 0) -> list[Row]:
        """Sample a token for each row from `first` on; return the rows that ended."""
        self._note_version(version)
        if self._columns["tokens"].shape[1] <= self._longest:
            self._grow()
        self._longest += 1
        matchers = self._matchers(first)
        if matchers:
            logits = exclude(logits, matchers)
        ends = self._advance(logits, first).tolist()
        if matchers:
            sampled = self.last[first:].tolist()
            for i, matcher in matchers.items():
                matcher.consume([sampled[i]])
        ended = [first + i for i, has_ended in enumerate(ends) if has_ended]
        if self.cancelled:
            self.cancelled = False
            cancelled = (i for i, row in enumerate(self.rows) if row.future.done() and not row.finished)
            ended = sorted({*ended, *cancelled})
        failed = [first + i for i, matcher in matchers.items() if matcher.failure is not None]
        if failed:
            ended = sorted({*ended, *failed})
        if ended:
            self._finish(ended)
        return [self.rows[i] for i in ended]

    @torch.inference_mode()
    def interrupt(self) -> list[Row]:
        """End all rows as they are; return them."""
        unfinished = [i for i, row in enumerate(self.rows) if not row.finished]
        for i in unfinished:
            self.rows[i].interrupted = True
        if unfinished:
            self._finish(unfinished)
        return [self.rows[i] for i in unfinished]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep the rows at these indices, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self._device)
        self._columns = {name: column[index] for name, column in self._columns.items()}
        self.rows = [self.rows[i] for i in rows]
        self._numbers.clear()
        self._longest = int(self._columns["count"].max()) if rows else 0

    def _advance(self, logits: Tensor, first: int) -> Tensor:
        """Sample a token for each row from `first` on; return whether it is the last one, [N] bool, False if ended."""
        columns, u = self._columns, self._draw(first)
        if first or self._replayed is None:
            return self._append({name: column[first:] for name, column in columns.items()}, logits, u)
        if u.shape != self._u.shape:
            self._u = torch.empty_like(u)
        self._u.copy_(u)  # at a fixed address
        append = partial(self._append, columns, logits, self._u)
        return self._replayed(append, logits, self._u, columns["tokens"])  # no column is replaced without this one

    def _append(self, part: dict[str, Tensor], logits: Tensor, u: Tensor) -> Tensor:
        """Append a token to each row of a part of the columns; the host does not wait for the device."""
        temperature = None if self._temperature_is_1 else part["temperature"]
        truncation = None if self._untruncated else Truncation(part["top_p"], part["top_k"], part["min_p"])
        tokens, logps, candidates = choose(logits, u, temperature, truncation, self._largest_k, greedy=self._greedy)
        index = part["count"][:, None]
        part["tokens"].scatter_(1, index, tokens[:, None])
        part["logps"].scatter_(1, index, logps[:, None])
        if candidates is not None:
            rows = torch.arange(len(tokens), device=self._device)
            part["candidates"][rows, part["count"], : candidates.shape[-1]] = candidates.int()
        part["last"].copy_(tokens)
        part["count"] += 1
        part["position"] += 1
        ends = (tokens[:, None] == part["stops"]).any(-1) | (part["count"] >= part["budget"]) | ~logps.isfinite()
        return ends & part["alive"]

    def _draw(self, first: int) -> Tensor:
        """Return the uniform number [N] f64 of the next token of each row from `first` on."""
        if self._numbers and not first:
            return self._numbers.pop()
        keys, positions = (self._columns[name][first:] for name in ("key", "position"))
        if first:  # these rows alone have a token more
            self._numbers.clear()
            return uniform(keys, positions)
        offsets = torch.arange(AHEAD, device=self._device)
        self._numbers = list(uniform(keys, positions + offsets[:, None]).flip(0).unbind(0))
        return self._numbers.pop()

    def _matchers(self, first: int) -> dict[int, StructureMatcher]:
        """Return the matchers of unfinished rows from `first` on, by their index after it."""
        if not self._any_structure:
            return {}
        rows = enumerate(self.rows[first:])
        return {i: row.matcher for i, row in rows if row.matcher is not None and not row.finished}

    def _note_version(self, version: int) -> None:
        """Record the version of the weights that samples the next tokens."""
        if version == self._version:
            return
        for row, count in zip(self.rows, self._columns["count"].tolist(), strict=True):
            if not row.versions or row.versions[-1][1] != version:
                row.versions.append((count, version))
        self._version = version

    def _grow(self) -> None:
        columns = max(GROWTH, self._longest // 4)
        for name in ("tokens", "logps"):
            self._columns[name] = torch.nn.functional.pad(self._columns[name], (0, columns))
        self._columns["candidates"] = torch.nn.functional.pad(self._columns["candidates"], (0, 0, 0, columns), value=-1)
        self._columns["routes"] = torch.nn.functional.pad(self._columns["routes"], (0, 0, 0, 0, 0, columns))

    def _finish(self, ended: Sequence[int]) -> None:
        index = torch.tensor(ended, device=self._device)
        self._columns["alive"][index] = False
        counts = self._columns["count"][index].tolist()
        tokens = self._columns["tokens"][index].tolist()
        logps = self._columns["logps"][index].tolist()
        for i, count, row_tokens, row_logps in zip(ended, counts, tokens, logps, strict=True):
            row = self.rows[i]
            recorded = self._columns["candidates"][i, :count] if row.request.sampling.top_k else None
            candidates = [] if recorded is None else ragged(recorded)
            row.finish(row_tokens[:count], row_logps[:count], candidates, self._columns["routes"][i, :count])


def ragged(candidates: Tensor) -> list[Sequence[int]]:
    """Return the ids of each row of a tensor [n,K] i32 that is padded with -1, as arrays."""
    counts = (candidates >= 0).sum(-1).tolist()
    return [array("i", row[:count].tobytes()) for row, count in zip(candidates.cpu().numpy(), counts, strict=True)]


def _equally_wide(old: Tensor, new: Tensor, fill: int) -> list[Tensor]:
    """Pad two tensors [N,C,...] to the same shape but for their rows."""
    shapes = [max(sizes) for sizes in zip(old.shape[1:], new.shape[1:], strict=True)]
    missing = [[size - own for size, own in zip(shapes, x.shape[1:], strict=True)] for x in (old, new)]
    padding = [[amount for size in reversed(sizes) for amount in (0, size)] for sizes in missing]
    return [torch.nn.functional.pad(x, pad, value=fill) for x, pad in zip((old, new), padding, strict=True)]
