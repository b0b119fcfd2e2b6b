"""Recorded decode steps: their inputs keep their addresses, and their logits equal those of plain steps.

A recorded step is the step itself here, called again; on a GPU, `tests/gpu` records its kernels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rlkit_engine_torch.engine import _has_room
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.graphs import COLUMNS, GraphDecoder
from rlkit_engine_torch.recording import Graph, side_stream
from torch import Tensor

from rlkit.testing import random_model

Run = Callable[[], Tensor]


class Recorded:
    """Counts recordings and replays, and checks that every replay reads the recorded memory."""

    def __init__(self) -> None:
        self.decoder: GraphDecoder
        self.recorded = self.replayed = 0
        self.before: list[Any] = []

    def read(self) -> list[int]:
        decoder = self.decoder
        cached = [x for layer in decoder.layers for x in (layer.prompts, layer.rows)]
        fixed = [
            decoder._tokens,
            decoder._positions,
            decoder._last,
            decoder._row_indices,
            decoder._attention.slots,
            decoder._attention.query_indices,
        ]
        return [x.data_ptr() for x in (*cached, *fixed, decoder._model()._rotations)]

    def __call__(self, run: Run, before: Run | None) -> Run:
        self.recorded += 1
        self.before.append(before)
        inputs = self.read()

        def replay() -> Tensor:
            self.replayed += 1
            assert self.read() == inputs
            return run()

        return replay


def decoders(kind: str = "qwen2") -> tuple[FusedDecoder, GraphDecoder, Recorded]:
    model, recorded = random_model(kind, initializer_range=0.3), Recorded()
    recorded.decoder = GraphDecoder(model, record=recorded)
    return FusedDecoder(model), recorded.decoder, recorded


def alike(plain: Any, graphs: Any, call: Callable[[Any], Any]) -> None:
    expected, replayed = call(plain), call(graphs)
    if expected is not None:
        torch.testing.assert_close(replayed, expected, rtol=1e-4, atol=1e-4)
    assert graphs.positions().tolist() == plain.positions().tolist()
    assert (graphs.end, graphs.starts) == (plain.end, plain.starts)


def go(plain: Any, graphs: Any, steps: int) -> None:
    for i in range(steps):
        tokens = torch.arange(plain.rows) + 3 + i % 7
        alike(plain, graphs, lambda decoder, tokens=tokens: decoder.step(tokens))  # type: ignore[misc]


def test_recorded_steps_yield_what_plain_ones_do() -> None:
    """Rows join and leave, and columns exceed those of a recorded step; every change is recorded anew."""
    plain, graphs, recorded = decoders("qwen3")
    alike(plain, graphs, lambda decoder: decoder.admit([[5, 3, 4, 6], [5, 3]], [3, 2]))
    go(plain, graphs, 8)
    assert (recorded.recorded, recorded.replayed) == (1, 8)  # the first replay is a check
    alike(plain, graphs, lambda decoder: decoder.keep([0, 2, 4]))
    go(plain, graphs, 3)
    assert recorded.recorded == 2
    alike(plain, graphs, lambda decoder: decoder.admit([[7, 8, 9]], [2]))
    go(plain, graphs, COLUMNS + 5)
    assert recorded.recorded == 4
    assert recorded.before[0] is None
    assert all(before is not None for before in recorded.before[1:])  # whose memory is used
    alike(plain, graphs, lambda decoder: decoder.keep([3]))
    go(plain, graphs, 2 * COLUMNS)
    alike(plain, graphs, lambda decoder: decoder.admit([[7, 8]], [3], [[9] * (3 * COLUMNS), [], [5]]))
    go(plain, graphs, COLUMNS)
    for decoder in (plain, graphs):
        decoder.keep([])
        decoder.release()
        decoder.refresh()
    steps, replayed = graphs._steps, recorded.replayed - recorded.recorded
    alike(plain, graphs, lambda decoder: decoder.admit([[5, 3]], [1]))
    go(plain, graphs, 4)
    assert recorded.before[-1] is None
    assert graphs.health() == {"fused": 1.0, "recorded": (replayed + 4 - 1) / (steps + 4)}


class FakeCuda:
    """A stub of `torch.cuda` that records the order of calls; `stream` is the current one."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.streams = 0
        self.stream: Any = self.Stream("cpu")

    def Stream(self, device: Any) -> Any:
        self.streams += 1
        return SimpleNamespace(number=self.streams, device=torch.device(device), wait_stream=lambda stream: None)

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(
            pool=lambda: "pool",
            capture_begin=lambda pool, **_: self.events.append(("capture", self.stream.number)),
            capture_end=lambda: self.events.append(("end", self.stream.number)),
        )

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


def test_all_graphs_are_recorded_on_one_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, product = FakeCuda(), torch.bmm
    for name, value in (("CUDAGraph", cuda.CUDAGraph), ("Stream", cuda.Stream), ("stream", cuda.on)):
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: cuda.stream)

    def noted(first: Tensor, second: Tensor) -> Tensor:
        cuda.events.append(("product", cuda.stream.number))
        return product(first, second)

    monkeypatch.setattr(torch, "bmm", noted)
    side_stream.cache_clear()
    first = Graph(lambda: torch.ones(1))
    Graph(lambda: torch.ones(1), first)
    side_stream.cache_clear()
    assert cuda.events == [(event, 2) for event in ["product", "capture", "end"] * 2]


def test_steps_that_cannot_be_recorded_are_run() -> None:
    plain, graphs, _ = decoders()

    def refuse(run: Run, before: Run | None) -> Run:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    graphs.record = refuse
    alike(plain, graphs, lambda decoder: decoder.admit([[5, 3, 4], [6]], [2, 1]))
    with pytest.warns(
        UserWarning, match="not recorded in CUDA graphs: operation not permitted when stream is capturing$"
    ):
        go(plain, graphs, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        go(plain, graphs, 5)
        alike(plain, graphs, lambda decoder: decoder.keep([2]))
        go(plain, graphs, 5)


def test_a_row_that_is_not_finite_keeps_replay() -> None:
    _, graphs, _ = decoders()
    run = graphs._run

    def with_nan() -> Tensor:
        logits = run()
        logits[1] = torch.nan
        return logits

    graphs._run = with_nan  # type: ignore[method-assign]
    graphs.record = lambda run, before: run
    graphs.admit([[5, 3, 4], [6]], [2, 1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            graphs.step(torch.tensor([3, 4, 5]))
    assert graphs.health()["recorded"] > 0


@pytest.mark.parametrize("wrong", [lambda x: x * 1.1 + 0.1, lambda x: x * torch.nan])
def test_replays_that_differ_are_not_used(wrong: Callable[[Tensor], Tensor]) -> None:
    plain, graphs, _ = decoders()
    graphs.record = lambda run, before: lambda: wrong(run())
    alike(plain, graphs, lambda decoder: decoder.admit([[5, 3, 4], [6]], [2, 1]))
    with pytest.warns(UserWarning, match="a replay's logits are .* of their spread away"):
        go(plain, graphs, 1)
    go(plain, graphs, 5)


def test_copies_of_the_weights_take_a_part_of_a_gpu_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model in float32, whose copies take half the memory under autocast."""
    policy = random_model("qwen2")
    size = 4 * sum(weight.numel() for weight in policy.parameters())
    for size_limit, half, fits in ((4 * size, False, True), (4 * size - 8, False, False), (2 * size, True, True)):
        runtime: Any = SimpleNamespace(policy=policy, device=torch.device("cuda"), autocast=nullcontext)
        gpu = SimpleNamespace(total_memory=size_limit)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, gpu=gpu: gpu)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind, half=half: half)
        assert _has_room(runtime) is fits
    runtime.device = torch.device("cpu")
    assert _has_room(runtime)
