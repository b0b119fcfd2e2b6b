"""The requests that TorchEngine samples for at once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite

import torch
from torch import Tensor

from rlkit.errors import EngineError
from rlkit.ops.random import uniform
from rlkit.ops.sampling import Truncation, choose
from rlkit.types import Completion, Request, StopReason

GROWTH = 64
"""Tokens by which the memory of a row grows at least."""


@dataclass(eq=False)
class Row:
    """A request in progress."""

    request: Request
    budget: int
    stop_ids: frozenset[int]
    future: asyncio.Future[Completion]
    key: int
    versions: list[tuple[int, int]] = field(default_factory=list)
    """How many tokens there were when a version of the weights was used first, and the version."""
    completion: Completion | None = None
    interrupted: bool = False
    failure: EngineError | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None

    def finish(self, tokens: list[int], logps: list[float]) -> None:
        """Note what was sampled; it ends where a log-prob is not finite."""
        ends = [count for count, _ in self.versions[1:]] + [len(tokens)]
        versions = [v for (start, v), end in zip(self.versions, ends, strict=True) for _ in range(end - start)]
        self.completion = Completion(tokens, logps, versions, self._stop(tokens))
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

    def answer(self) -> None:
        """Resolve the future with what was sampled, or with why that failed, unless it was cancelled."""
        assert self.completion is not None
        if self.future.done():
            return
        if self.failure is None:
            self.future.set_result(self.completion)
        else:
            self.future.set_exception(self.failure)


@dataclass
class Group:
    """Rows that go on from one prompt, and the tokens of a pass over it and over what they have of their own."""

    prompt: tuple[int, ...]
    rows: list[Row]
    tokens: int


def by_prompt(rows: Sequence[Row], resumed: bool, most: int) -> list[Group]:
    """Return rows by their prompts, in the order of their first rows.

    If `resumed`, what a row had sampled before is not part of its prompt. A prompt is there again where its pass would
    take more than `most` tokens.
    """
    found: list[Group] = []
    latest: dict[tuple[int, ...], Group] = {}
    for row in rows:
        own = row.request.resumed if resumed else 0
        prompt = row.request.tokens[: len(row.request.tokens) - own]
        group = latest.get(prompt)
        if group is None or (own and group.tokens + own > most):
            group = latest[prompt] = Group(prompt, [], len(prompt))
            found.append(group)
        group.rows.append(row)
        group.tokens += own
    return found


class Batch:
    """Rows, in the order of their logits, and on the device what they sample next and have sampled.

    `positions` [R] i64 are those of the tokens that come next, and `last` [R] i64 the tokens that came last.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: list[Row] = []
        self.cancelled = False
        """Whether a row's future was cancelled since `sample` last looked."""
        self._device = device
        self._version: int | None = None
        self._most = 0
        self._columns: dict[str, Tensor] = {}
        self._plain = self._whole = True

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def last(self) -> Tensor:
        return self._columns["last"]

    @torch.inference_mode()
    def add(self, rows: Sequence[Row]) -> None:
        """Append rows."""
        most = max((len(r.stop_ids) for r in (*rows, *self.rows)), default=0)
        of = [row.request.sampling for row in rows]
        self._plain = self._plain and all(s.temperature == 1 for s in of)
        self._whole = self._whole and all(s.top_p == 1 and s.top_k == 0 and s.min_p == 0 for s in of)
        new = {
            "key": [row.key for row in rows],
            "temperature": [float(s.temperature) for s in of],
            "top_p": [float(s.top_p) for s in of],
            "top_k": [s.top_k for s in of],
            "min_p": [float(s.min_p) for s in of],
            "stops": [sorted(row.stop_ids) + [-1] * (most - len(row.stop_ids)) for row in rows],
            "budget": [row.budget for row in rows],
            "position": [len(row.request.tokens) for row in rows],
            "count": [0 for _ in rows],
            "last": [0 for _ in rows],
            "alive": [True for _ in rows],
        }
        columns = {name: torch.tensor(values, device=self._device) for name, values in new.items()}
        columns["stops"] = columns["stops"].view(len(rows), most).long()
        columns["tokens"] = torch.zeros(len(rows), 0, dtype=torch.long, device=self._device)
        columns["logps"] = torch.zeros(len(rows), 0, device=self._device)
        for name, column in columns.items():
            old = self._columns.get(name, column[:0])
            self._columns[name] = torch.cat(_as_wide(old, column, -1 if name == "stops" else 0))
        self.rows += rows
        self._version = None

    @torch.inference_mode()
    def sample(self, logits: Tensor, version: int, first: int = 0) -> list[Row]:
        """Sample a token for each row from `first` on; return the rows that ended."""
        self._note(version)
        if self._columns["tokens"].shape[1] <= self._most:
            self._grow()
        self._most += 1
        part = {name: column[first:] for name, column in self._columns.items()}
        temperature = None if self._plain else part["temperature"]
        truncation = None if self._whole else Truncation(part["top_p"], part["top_k"], part["min_p"])
        tokens, logps = choose(logits, uniform(part["key"], part["position"]), temperature, truncation)
        at = part["count"][:, None]
        part["tokens"].scatter_(1, at, tokens[:, None])
        part["logps"].scatter_(1, at, logps[:, None])
        part["last"].copy_(tokens)
        part["count"] += 1
        part["position"] += 1
        ends = (tokens[:, None] == part["stops"]).any(-1) | (part["count"] >= part["budget"]) | ~logps.isfinite()
        ended = [first + i for i in (ends & part["alive"]).nonzero().squeeze(-1).tolist()]
        if self.cancelled:
            self.cancelled = False
            gone = (i for i, row in enumerate(self.rows) if row.future.done() and not row.finished)
            ended = sorted({*ended, *gone})
        if ended:
            self._finish(ended)
        return [self.rows[i] for i in ended]

    @torch.inference_mode()
    def interrupt(self) -> list[Row]:
        """End all rows as they are; return them."""
        going = [i for i, row in enumerate(self.rows) if not row.finished]
        for i in going:
            self.rows[i].interrupted = True
        if going:
            self._finish(going)
        return [self.rows[i] for i in going]

    @torch.inference_mode()
    def keep(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order."""
        index = torch.tensor(rows, dtype=torch.long, device=self._device)
        self._columns = {name: column[index] for name, column in self._columns.items()}
        self.rows = [self.rows[i] for i in rows]
        self._most = int(self._columns["count"].max()) if rows else 0

    def _note(self, version: int) -> None:
        """Note which version of the weights samples the next tokens."""
        if version == self._version:
            return
        for row, count in zip(self.rows, self._columns["count"].tolist(), strict=True):
            if not row.versions or row.versions[-1][1] != version:
                row.versions.append((count, version))
        self._version = version

    def _grow(self) -> None:
        more = max(GROWTH, self._most // 4)
        for name in ("tokens", "logps"):
            self._columns[name] = torch.nn.functional.pad(self._columns[name], (0, more))

    def _finish(self, ended: Sequence[int]) -> None:
        index = torch.tensor(ended, device=self._device)
        self._columns["alive"][index] = False
        counts = self._columns["count"][index].tolist()
        tokens = self._columns["tokens"][index].tolist()
        logps = self._columns["logps"][index].tolist()
        for i, n, sampled, found in zip(ended, counts, tokens, logps, strict=True):
            self.rows[i].finish(sampled[:n], found[:n])


def _as_wide(old: Tensor, new: Tensor, fill: int) -> list[Tensor]:
    """Pad two tensors [N,C] to the same number of columns."""
    if old.dim() == 1:
        return [old, new]
    width = max(old.shape[1], new.shape[1])
    return [torch.nn.functional.pad(x, (0, width - x.shape[1]), value=fill) for x in (old, new)]
