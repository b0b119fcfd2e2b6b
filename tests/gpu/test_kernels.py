"""Kernels of GPUs against plain ones: packed attention and recorded decode steps; `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from rlkit_engine_torch import blocks, row_attention
from rlkit_engine_torch.fused import FusedDecoder
from rlkit_engine_torch.graphs import COLUMNS, GraphDecoder
from rlkit_engine_torch.prefixes import Prefix
from rlkit_engine_torch.recording import Graph
from rlkit_engine_torch.sampling import block_sums, choose
from torch import Tensor

from rlkit.models.actor import Actor
from rlkit.ops import logps
from rlkit.ops.attention import Layout, Scoring
from rlkit.ops.fusion import softmax_grads_, softmax_statistics
from rlkit.ops.logps import ALL, OutputLayer, token_logps
from rlkit.ops.ragged import by_flash, by_sdpa
from rlkit.testing import random_model
from rlkit.types import Sampling
from tests.unit.engines.test_fused import measured
from tests.unit.engines.test_recording import MIXED, OPTIONS, Sampled, check_recorded
from tests.unit.models.test_packing import rows_of
from tests.unit.ops.test_fusion import OF_LAYERS, check_join_of_any_shape
from tests.unit.ops.test_ragged import layout_of

pytestmark = pytest.mark.gpu
SHAPE: Any = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "initializer_range": 0.05}


def autocast() -> AbstractContextManager[None]:
    return torch.autocast("cuda", torch.bfloat16)


def on_gpu(layout: Layout) -> Layout:
    return Layout(layout.segments, layout.shared, torch.device("cuda"))


@pytest.mark.parametrize("heads", [(8, 8), (14, 2)])
def test_flash_attention_of_ragged_segments(heads: tuple[int, int]) -> None:
    """In bfloat16 against float32, with and without prompts."""
    for groups in ([(37, [5, 90, 1]), (0, [64]), (3, [8, 8])], [(0, [7, 130])]):
        layout, found = on_gpu(layout_of(groups)), []
        for attend, kind in ((by_sdpa, torch.float32), (by_flash, torch.bfloat16)):
            torch.manual_seed(0)
            shapes = [(layout.segments[-1][1], n, 64) for n in (heads[0], heads[1], heads[1])]
            inputs = [torch.randn(shape, device="cuda").bfloat16().to(kind).requires_grad_() for shape in shapes]
            output = attend(*inputs, Scoring(0.125), layout)  # type: ignore[call-arg, arg-type]
            (output.float() * torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)).sum().backward()
            found.append([output, *(x.grad for x in inputs if x.grad is not None)])
        for one, other in zip(*found, strict=True):
            assert (one - other).float().square().mean().sqrt() <= 0.02 * one.std()


@pytest.mark.parametrize("half", [False, True])
def test_packed_passes_are_used_and_equal_plain_ones(half: bool) -> None:
    module = Actor(random_model("qwen2", **SHAPE)).cuda()
    tokens, mask = (x.cuda() for x in rows_of([60, 9, 1], [[3, 90, 1], [20, 2], [5]], 0))
    found: list[list[Tensor]] = []
    with autocast() if half else nullcontext():
        module.check_passes(torch.device("cuda"))
        assert module.passes.packed
        for packed in (False, True):
            module.passes.packed = packed
            module.zero_grad()
            out = module(tokens, mask)
            (out.logps * torch.linspace(-1, 1, tokens.numel(), device="cuda").view_as(tokens)).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
            found.append([out.logps.detach(), gradient])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= (0.05 if half else 1e-4) * one.norm() + 1e-6


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.filterwarnings("error:.*torch.compile failed")
def test_compiled_passes_over_logits_equal_those_in_place(trained: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, in chunks of 7 rows and the rest."""
    for function in (softmax_statistics, softmax_grads_):
        monkeypatch.setattr(function, "min_elements", 1)
    torch.manual_seed(0)
    hidden, weight = (torch.randn(n, 64, device="cuda").bfloat16() for n in (20, 5000))
    hidden, targets = hidden.requires_grad_(), torch.arange(20, device="cuda")
    weight.requires_grad_(trained)
    inputs, results = [hidden, weight] if trained else [hidden], []
    for fused in (True, False):
        monkeypatch.setattr(logps, "_fuses", lambda *_, fused=fused: fused)
        statistics = token_logps(hidden, OutputLayer(weight, None, 0.8), targets, reads=ALL, memory=7 * 5000 * 2)
        assert statistics.entropy is not None
        loss = (statistics.logps.square() + statistics.entropy.square()).sum()
        results.append([statistics.logps, statistics.entropy, *torch.autograd.grad(loss, inputs)])
    for compiled, plain in zip(*results, strict=True):
        assert (compiled - plain).float().norm() <= 0.02 * plain.float().norm()


@pytest.mark.filterwarnings("error:.*torch.compile failed")
def test_compiled_layers_equal_those_that_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed passes with prompts that rows share, and their gradients, for two numbers of tokens."""
    module = Actor(random_model("qwen2", **SHAPE)).cuda()
    module.check_passes(torch.device("cuda"))
    for length in (90, 33):
        tokens, mask = (x.cuda() for x in rows_of([60, 9, 1], [[3, length, 1], [20, 2], [5]], 0))
        found: list[list[Tensor]] = []
        for least in (2**60, 1):
            for function in OF_LAYERS:
                monkeypatch.setattr(function, "min_elements", least)
            module.zero_grad()
            with autocast():
                logps = module(tokens, mask).logps
            (logps * torch.linspace(-1, 1, tokens.numel(), device="cuda").view_as(tokens)).sum().backward()
            gradient = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
            found.append([logps.detach(), gradient])
        for one, other in zip(*found, strict=True):
            assert (one - other).norm() <= 0.02 * one.norm()


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
@pytest.mark.filterwarnings("error:.*torch.compile failed")
def test_compiled_decode_steps_equal_those_that_are_not(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, found = random_model(kind, **SHAPE).cuda(), []
    for compiled in (False, True):
        for part in (blocks, row_attention):
            monkeypatch.setattr(part, "compiles", lambda *_, wanted=compiled: wanted)
        decoder = FusedDecoder(model, autocast)  # type: ignore[arg-type]
        logits = [decoder.admit([[5, 3, 4] * 9, [9, 8]], [9, 7], [[7] * (i % 3) for i in range(16)])]
        logits += [decoder.step(torch.arange(16, device="cuda") + 5 * step) for step in range(3)]
        found.append(torch.cat(logits).float())
    assert (found[0] - found[1]).norm() <= 0.02 * found[0].norm()


def test_join_is_compiled_for_any_shape_here_too() -> None:
    check_join_of_any_shape("cuda")


def test_flash_attention_where_queries_share_no_head_of_keys() -> None:
    """As torch 2.11 wants them: the same values and gradients with a head of keys for each of queries."""
    layout, found = on_gpu(layout_of([(37, [5, 90, 1]), (0, [64])])), []
    for shares in (True, False):
        torch.manual_seed(0)
        inputs = [torch.randn(layout.segments[-1][1], n, 64, device="cuda").bfloat16() for n in (14, 2, 2)]
        query, key, value = (x.requires_grad_() for x in inputs)
        if not shares:
            key, value = (x.repeat_interleave(7, 1) for x in (key, value))
        output = by_flash(query, key, value, Scoring(0.125), layout)
        (output.float() * torch.linspace(-1, 1, output.numel(), device="cuda").view_as(output)).sum().backward()
        found.append([output, *(x.grad for x in inputs if x.grad is not None)])
    for one, other in zip(*found, strict=True):
        assert (one - other).float().norm() <= 0.02 * one.float().norm()


def test_large_biases_of_keys_are_not_rounded_away(monkeypatch: pytest.MonkeyPatch) -> None:
    model, gaps = random_model("qwen2", key_bias=100.0, **SHAPE).cuda(), measured(monkeypatch)
    decoder = FusedDecoder(model, autocast)  # type: ignore[arg-type]
    decoder.admit([list(range(3, 203)), list(range(203, 3, -1))], [3, 2])
    for step in range(20):
        decoder.step(torch.arange(5, device="cuda") + 7 * step)
    assert max(gaps) < 0.01


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_not_finite_do_not_end_the_process(bad: float) -> None:
    logits = torch.randn(4, 151936, device="cuda")
    logits[1] = bad
    tokens, logps, _ = choose(logits, torch.full((4,), 1 - 2.0**-53, dtype=torch.float64, device="cuda"))
    assert logps.isfinite().tolist() == [True, False, True, True]
    assert tokens.max() < 151936


def test_steps_that_are_recorded_anew_take_no_more_memory() -> None:
    decoder, held = GraphDecoder(random_model("qwen2", **SHAPE).cuda(), autocast), []  # type: ignore[arg-type]
    decoder.admit([[5, 3, 4, 6] * 9], [64])
    for _ in range(12):
        for _ in range(4):
            decoder.step(torch.arange(decoder.rows, device="cuda") + 3)
        assert decoder._replay is not None
        held.append(torch.cuda.memory_reserved())
        decoder.keep(range(decoder.rows - 1))
    assert held[-1] <= held[2] + 32 * 1024**2


@pytest.mark.parametrize("options", [[OPTIONS] * 4, MIXED], ids=["alike", "mixed"])
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.filterwarnings("error")
def test_recorded_sampling_is_plain_sampling(
    options: list[Sampling], compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_sums, "min_elements", 0 if compiles else 2**62)
    check_recorded(Sampled(Graph, "cuda"), options)


@pytest.mark.parametrize("half", [False, True])
def test_decode_steps_are_recorded_and_yield_the_same(half: bool) -> None:
    model = random_model("qwen2", **SHAPE).cuda()
    cast = autocast if half else nullcontext
    plain, graphs = FusedDecoder(model, cast), GraphDecoder(model, cast)  # type: ignore[arg-type]

    def go(steps: int) -> None:
        for i in range(steps):
            tokens = torch.arange(plain.rows, device="cuda") + 3 + i % 7
            expected, found = plain.step(tokens), graphs.step(tokens)
            assert (found - expected).float().norm() <= (0.05 if half else 1e-3) * expected.float().norm()
            assert graphs.positions().tolist() == plain.positions().tolist()
        assert graphs._replay is not None

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for decoder in (plain, graphs):
            decoder.admit([[5, 3, 4, 6] * 9, [5, 3]], [30, 20])
        go(12)
        for decoder in (plain, graphs):
            decoder.keep([*range(0, 50, 3)])
        go(COLUMNS + 10)
        for decoder in (plain, graphs):
            decoder.admit([[7, 8, 9]], [4])
        go(20)
        for decoder in (plain, graphs):
            decoder.admit([[7, 8, 9] * 5, [3]], [3, 1], [[], [5, 6] * COLUMNS, [4], [8]])
        go(20)
        prompt = [5, 3, 4, 6] * 9
        rows = [[*prompt[:9], 8], [*prompt[:30], 9, 7]]
        prefixes = [Prefix(count, [plain.keys_values(0, 0, count)]) for count in (9, 30)]
        for decoder in (plain, graphs):
            complete = decoder.admit(rows, [1, 2])
            continued = decoder.admit(rows, [1, 2], (), (), prefixes)
            assert (continued - complete).float().norm() <= (0.05 if half else 1e-3) * complete.float().norm()
        go(20)
        for decoder in (plain, graphs):
            decoder.keep([])
            decoder.release()
