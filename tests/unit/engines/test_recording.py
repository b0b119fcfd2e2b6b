"""Sampling that is recorded, against sampling that is not."""

from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from rlkit_engine_torch.batch import GROWTH, DecodeBatch, Row
from rlkit_engine_torch.recording import Record, Replayed, Run
from rlkit_engine_torch.sampling import block_sums
from torch import Tensor

from rlkit.types import Completion, Request, SampleKey, Sampling
from tests.unit.engines.recordings import record

VOCABULARY, STOPS = 1500, frozenset({0, 1, 2, 3})
OPTIONS = Sampling(max_tokens=300)
MIXED = [OPTIONS, replace(OPTIONS, temperature=0.0), replace(OPTIONS, temperature=0.5), replace(OPTIONS, top_k=5)]


class FixedRecord:
    """Counts recordings and replays of a batch, and checks that each replay reads the memory of its recording."""

    def __init__(self, make: Record) -> None:
        self.make = make
        self.made: dict[Run | None, Run | None] = {None: None}
        self.batch: DecodeBatch
        self.recorded = self.replayed = 0
        self.before: list[Run | None] = []

    def addresses(self) -> list[int]:
        return [column.data_ptr() for column in (*self.batch._columns.values(), self.batch._u)]

    def __call__(self, run: Run, before: Run | None) -> Run:
        self.recorded += 1
        self.before.append(before)
        addresses, recording = self.addresses(), self.make(run, self.made[before])

        def replay() -> Tensor:
            self.replayed += 1
            assert self.addresses() == addresses
            return recording()

        self.made[replay] = recording
        return replay


class Sampled:
    """Samples rows of two batches from the same logits: plainly, and recorded, from logits at a fixed address."""

    def __init__(self, make: Record = record, device: str = "cpu") -> None:
        self.device, self.record = torch.device(device), FixedRecord(make)
        self.plain = DecodeBatch(self.device)
        self.recorded = self.record.batch = DecodeBatch(self.device, self.record)
        self.logits = torch.empty(0)
        self.random = torch.Generator().manual_seed(0)

    def add(self, options: list[Sampling], budgets: list[int]) -> None:
        for batch in (self.plain, self.recorded):
            start = len(batch)
            requests = [Request((5,), sampling, SampleKey(0, 0, "", 0), session="") for sampling in options]
            batch.add(
                [
                    Row(request, budget, STOPS, None, start + i)  # type: ignore[arg-type]
                    for i, (request, budget) in enumerate(zip(requests, budgets, strict=True))
                ]
            )
            logits = torch.linspace(-3, 3, VOCABULARY, device=self.device).repeat(len(options), 1)
            batch.sample(logits, 0, start)
        self.logits = torch.empty(len(self.plain), VOCABULARY, device=self.device)

    def keep(self, rows: list[int]) -> None:
        for batch in (self.plain, self.recorded):
            batch.keep(rows)
        self.logits = torch.empty(len(rows), VOCABULARY, device=self.device)

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self.logits.copy_(torch.randn(self.logits.shape, generator=self.random) * 3)
            ended = [
                [row.key for row in batch.sample(logits, 0)]
                for batch, logits in ((self.plain, self.logits.clone()), (self.recorded, self.logits))
            ]
            assert ended[0] == ended[1]
        for one, other in zip(self.plain.rows, self.recorded.rows, strict=True):
            assert one.completion == other.completion
        for name, column in self.plain._columns.items():
            assert torch.equal(column, self.recorded._columns[name]), name


@pytest.mark.parametrize("options", [[OPTIONS] * 4, MIXED], ids=["alike", "mixed"])
def test_recorded_sampling_is_plain_sampling(options: list[Sampling]) -> None:
    check_recorded(Sampled(), options)


def check_recorded(both: Sampled, options: list[Sampling]) -> None:
    """Rows end, join and leave, and their tokens outgrow their memory; each change is recorded again."""
    both.add(options, [7, 20, 300, 300])
    both.go(30)
    assert (both.record.recorded, both.record.replayed) == (1, 28)  # run at first, and beside its recording
    both.keep([2, 3])
    both.go(1)
    both.add(options[::-1], [300, 40, 2, 300])
    both.go(GROWTH)
    assert both.record.recorded == 3  # the memory grew, too
    assert both.record.before[0] is None
    assert None not in both.record.before[1:]  # their memory is used
    completions: list[Completion] = [row.completion for row in both.plain.rows if row.completion is not None]
    assert len(completions) >= 2


def test_other_logits_are_not_those_of_the_recording() -> None:
    both = Sampled()
    both.add([OPTIONS] * 4, [300] * 4)
    both.go(4)
    for _ in range(4):  # a step that is not recorded returns others each time
        both.logits = torch.empty(4, VOCABULARY)
        both.go(1)
    assert (both.record.recorded, both.record.replayed) == (1, 2)


def test_sampling_that_cannot_be_recorded_is_run() -> None:
    def refuse(run: Run, before: Any) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    replayed, x, count = Replayed(refuse), torch.ones(1), torch.zeros(1)
    run = partial(count.add_, 1)
    replayed(run, x)
    with pytest.warns(UserWarning, match="not recorded in CUDA graphs: operation not permitted .* is capturing$"):
        replayed(run, x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replayed(run, x)
    assert count == 3


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.filterwarnings("error:.*operator by operator")
def test_sums_that_are_compiled_are_the_same(scaled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, without its kernels, for numbers of rows that change."""
    monkeypatch.setattr(block_sums, "_compiled", None)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for rows in (8, 3, 5):
        logits = (torch.arange(rows * VOCABULARY).view(rows, -1) * 0.7).sin().bfloat16()
        scale = torch.linspace(0.5, 2, rows)[:, None] if scaled else None
        highest, sums, weights = block_sums.compiled(logits, scale, 512, False)
        expected = block_sums.function(logits, scale, 512, True)
        assert weights is None
        torch.testing.assert_close((highest, sums), expected[:2])
        assert expected[2] is not None
        torch.testing.assert_close(sums[:, 2], expected[2][:, 1024:].sum(-1))
    assert block_sums._compiled not in {None, block_sums.function}
