"""What a GPU compiles equals what runs elsewhere, and is compiled without a break."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch._inductor.ir
from rlkit_engine_torch import layers, row_attention
from rlkit_engine_torch.row_attention import PartialAttention
from torch._dynamo.testing import CompileCounter

from rlkit.models.actor import Actor
from rlkit.ops import fusion, logps
from rlkit.ops.fusion import Fused, softmax_grads_, softmax_statistics
from rlkit.ops.logps import ALL, DEFAULT_READS, LOGPS, OutputLayer, token_logps
from rlkit.testing import random_model
from rlkit.types import Reads
from tests.unit.models.test_packing import rows_of

OF_LAYERS = [x for x in vars(layers).values() if isinstance(x, Fused)]
FUSED = [softmax_statistics, softmax_grads_, *OF_LAYERS, row_attention.softmax_weights, row_attention.join]


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as on a GPU, without its kernels."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(fusion, "_has_large", lambda *_: True)
    for function in FUSED:
        monkeypatch.setattr(function, "_compiled", None)


def check_join_of_any_shape(device: str) -> None:
    """Compile `join` for any shape; some sizes are equal by chance."""
    generator = torch.Generator().manual_seed(0)
    compiled = torch.compile(row_attention.join.function, fullgraph=True, dynamic=True)
    for groups, size, heads, queries in ((4, 8, 8, 28), (6, 16, 16, 21), (16, 16, 16, 7)):
        own, prompts = (
            PartialAttention(*(torch.rand(n, q, d, generator=generator).to(device) for d in (size, 1, 1)))
            for n, q in ((groups, 7), (heads, queries))
        )
        indices = torch.randperm(heads * queries, generator=generator)[: groups * 7].to(device)
        torch.testing.assert_close(compiled(indices, own, prompts), row_attention.join.function(indices, own, prompts))


@pytest.mark.slow  # a compilation in C++
def test_join_is_compiled_for_any_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled as for a GPU up to the generated code, `join` reads the right elements."""
    monkeypatch.setattr(torch._inductor.ir, "is_cpu", lambda _: False)  # passes are joined as on a GPU
    check_join_of_any_shape("cpu")


@pytest.fixture
def fuses(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    return lambda value: monkeypatch.setattr(logps, "_fuses", lambda *_: value)


def statistics_and_grads(inputs: list[torch.Tensor], targets: torch.Tensor, reads: Reads, **options: Any) -> list[Any]:
    statistics = token_logps(inputs[0], OutputLayer(*inputs[1:], temperature=0.7), targets, reads=reads, **options)
    read = [x for x in (statistics.logps, statistics.entropy, statistics.mean) if x is not None]
    weights = torch.linspace(-1, 2, len(targets))
    loss = sum((x.square() * weights).sum() for x in read)
    trained = [x for x in inputs if x.requires_grad]
    return [*(x for x in statistics if x is not None), *torch.autograd.grad(loss, trained)]


@pytest.mark.parametrize(("rows", "reads", "trained"), [(7, ALL, True), (3, LOGPS, True), (3, DEFAULT_READS, False)])
@pytest.mark.parametrize("vocabulary", [11, 24])
@pytest.mark.usefixtures("traced")
def test_fused_passes_equal_those_in_place(
    vocabulary: int, rows: int, reads: Reads, trained: bool, fuses: Callable[[bool], None]
) -> None:
    """With logits of all 7 rows kept, or of 3 in memory, an output layer with and without a gradient, rows in parts."""
    generator = torch.Generator().manual_seed(0)
    inputs = [3 * torch.randn(*shape, generator=generator) for shape in ((7, 4), (vocabulary, 4), (vocabulary,))]
    for x in inputs[: 3 if trained else 1]:
        x.requires_grad_()
    targets = torch.randint(vocabulary, (7,), generator=generator)
    results = []
    for value in (False, True):
        fuses(value)
        results.append(statistics_and_grads(inputs, targets, reads, memory=4 * vocabulary * rows))
    for plain, fused in zip(*results, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-4, atol=1e-5)
    assert softmax_grads_._compiled is not None or not trained


@pytest.mark.parametrize("elements", [10**6, 2 * 24, 24])
def test_kept_logits_are_divided_where_their_indices_end(
    elements: int, fuses: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients are those of all logits at once, also in a second pass, since the first overwrites what is kept."""
    monkeypatch.setattr(logps, "MAX_ELEMENTS", elements)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 4, generator=generator).requires_grad_() for n in (5, 24))
    fuses(True)
    statistics = token_logps(hidden, OutputLayer(weight), torch.arange(5), reads=LOGPS)
    exact = torch.log_softmax(hidden @ weight.T, -1).diagonal()
    expected = torch.autograd.grad(exact.square().sum(), [hidden, weight])
    for _ in range(2):
        actual = torch.autograd.grad(statistics.logps.square().sum(), [hidden, weight], retain_graph=True)
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("lowest", [-torch.inf, torch.finfo(torch.float32).min])
def test_a_part_of_the_vocabulary_may_have_no_probability(lowest: float) -> None:
    """p = (1/4, 3/4) of logits (0, ln 3) among 256, of which all others are masked: a part has 2."""
    logits = torch.full((1, 256), lowest)
    logits[0, 7], logits[0, 200] = 0.0, math.log(3)
    reads = Reads(entropy=lowest > -torch.inf)
    (logps_, lse, entropy, *_), probs = softmax_statistics(logits, torch.tensor([200]), 1.0, reads, True)
    assert probs is not None
    assert [logps_.exp().item(), lse.exp().item(), probs[0, 7].item()] == pytest.approx([0.75, 4, 0.25])
    assert not reads.entropy or entropy.item() == pytest.approx(0.56233514)


def test_log_probs_near_zero_are_as_exact_as_the_logits() -> None:
    """p_0 of logits 1000 and 1000 - 12: log p_0 is -log(1 + e^-12); their sum's logarithm is a multiple of 6e-5."""
    logits = torch.tensor([[1000.0, 988.0]])
    (logps_, *_), _ = softmax_statistics(logits, torch.tensor([0]), 1.0, LOGPS, False)
    assert logps_.item() == pytest.approx(-math.log1p(math.exp(-12)), rel=0.01)


@pytest.mark.usefixtures("traced")
def test_fused_passes_over_bfloat16_return_it() -> None:
    """p = (1/4, 3/4) of logits (0, ln 3): the gradient of log p_1 is (-1/4, 1/4)."""
    logits = torch.tensor([[0.0, 3.0]]).log().clamp(min=0).bfloat16()
    (logps_, lse, entropy, *_), probs = softmax_statistics(logits, torch.tensor([1]), 1.0, DEFAULT_READS, True)
    assert logps_.dtype == torch.float32
    assert logps_.exp().item() == pytest.approx(0.75, abs=2e-3)
    assert entropy.item() == pytest.approx(0.5623, abs=2e-3)
    grads = logps.StatisticGrads(torch.ones(1), None, None, None)
    d_logits = softmax_grads_(logits, torch.tensor([1]), 1.0, (lse, entropy), grads)
    assert probs is not None
    assert d_logits.dtype == probs.dtype == torch.bfloat16
    torch.testing.assert_close(d_logits.float(), torch.tensor([[-0.25, 0.25]]), rtol=0.01, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("traced")
def test_fused_layers_equal_their_functions(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad, x, up = (torch.randn(6, 8).to(dtype) for _ in range(3))
    total = torch.randn(6, 8)
    weight, angles = torch.rand(8), torch.rand(2, 6, 4).to(dtype)
    heads = torch.randn(6, 3, 4).to(dtype), torch.randn(6, 1, 4).to(dtype)
    scale = layers.inverse_rms(x.float(), 1e-6)
    calls: list[tuple[Fused[Any, Any], tuple[Any, ...], dict[str, Any]]] = [
        (layers.rms_norm, (x, weight, 1e-6, torch.bfloat16), {}),
        (layers.sum_rms_norm, (total, x, weight, 1e-6, torch.bfloat16), {}),
        (layers.rms_norm_grad, (grad, x, weight, scale), {}),
        (layers.added_rms_norm_grad, (grad, up, x, weight, scale), {}),
        (layers.sum_rms_norm_grads, (grad, up, total, weight, scale), {"dtype": dtype}),
        (layers.rms_norm_weight_grad, (grad, x, scale), {}),
        (layers.swiglu, (x, up), {}),
        (layers.swiglu_grads, (grad, x, up), {}),
        (layers.rotate, (*heads, *angles, dtype), {}),
        (layers.rotate_back, (*heads, *angles, dtype), {}),
    ]
    for fused, inputs, options in calls:
        torch.testing.assert_close(fused(*inputs, **options), fused.function(*inputs, **options))
        assert fused._compiled not in {None, fused.function}


@pytest.mark.usefixtures("traced")
def test_functions_of_layers_are_compiled_once_for_all_numbers_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without a gradient, of views of any base."""
    counts: dict[str, CompileCounter] = defaultdict(CompileCounter)
    counted = lambda f, **_: torch._dynamo.optimize(counts[f.__name__], nopython=True)(f)  # noqa: E731
    actor = Actor(random_model("qwen2", hidden_size=64, num_hidden_layers=2))
    monkeypatch.setattr(torch, "compile", counted)
    monkeypatch.setattr(layers, "on_gpu", lambda _: True)
    for length in (9, 2, 30):
        tokens, mask = rows_of([60, 9, 1], [[3, length, 4], [20, 2], [length]], 0)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                actor(tokens, mask)
            logps = actor(tokens, mask).logps
        logps.sum().backward()
    names = [fused.function.__name__ for fused in OF_LAYERS]
    assert {name: count.frame_count for name, count in counts.items()} == dict.fromkeys(names, 1)


@pytest.mark.usefixtures("traced")
def test_fused_attention_of_rows_equals_its_functions() -> None:
    """Of any number of rows, prompts and columns."""
    torch.manual_seed(0)
    for rows, prompts, columns in ((3, 2, 5), (7, 3, 9)):
        parts = []
        for count in (rows, prompts):
            scores, mask = 4 * torch.randn(count, 4, columns), torch.randn(count, 1, columns)
            weights = row_attention.softmax_weights(scores, None, torch.bfloat16)
            torch.testing.assert_close(weights, row_attention.softmax_weights.function(scores, None, torch.bfloat16))
            masked = row_attention.softmax_weights(scores, mask, torch.bfloat16)
            torch.testing.assert_close(
                masked, row_attention.softmax_weights.function(scores + mask, None, torch.bfloat16)
            )
            values = torch.bmm(weights[0], torch.randn(count, columns, 6).bfloat16())
            parts.append(PartialAttention(values, *weights[1:]))
        inputs = (torch.randint(prompts * 4, (rows * 4,)), *parts)
        torch.testing.assert_close(row_attention.join(*inputs), row_attention.join.function(*inputs))
    for fused in FUSED[-2:]:
        assert fused._compiled not in {None, fused.function}


def test_a_function_that_cannot_be_compiled_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no triton\nin detail")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    double = Fused(lambda x: 2 * x)
    assert double(torch.ones(1)).item() == 2  # on a CPU, where nothing is compiled
    monkeypatch.setattr(fusion, "_has_large", lambda *_: True)
    with pytest.warns(UserWarning, match="torch.compile failed with RuntimeError: no triton; install triton"):
        assert double(torch.ones(1)).item() == 2
    assert double(torch.ones(1)).item() == 2


@pytest.mark.usefixtures("traced")
@pytest.mark.filterwarnings("error:.*operator by operator")
def test_each_thread_may_compile_many_variants() -> None:
    """More than torch's limit, in another thread than the one that compiled first."""
    add = Fused(lambda x, name: x + len(name))
    thread = threading.Thread(target=add, args=(torch.ones(1), ""))
    thread.start()
    thread.join()
    with torch._dynamo.config.patch(recompile_limit=2):
        assert [add(torch.ones(1), "a" * n).item() for n in range(4)] == [1, 2, 3, 4]


@pytest.mark.usefixtures("traced")
def test_a_function_of_too_many_variants_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Fused(lambda x, name: x + len(name))
    monkeypatch.setattr(fusion, "VARIANTS", 2)
    with torch._dynamo.config.patch(recompile_limit=2), pytest.warns(UserWarning, match="operator by operator"):
        assert [add(torch.ones(1), "a" * n).item() for n in range(4)] == [1, 2, 3, 4]


@pytest.mark.filterwarnings("error")
def test_nothing_is_compiled_where_torch_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "_has_large", lambda *_: True)
    double = Fused(lambda x: 2 * x)
    with torch._dynamo.config.patch(disable=True):
        assert double(torch.ones(1)).item() == 2
    assert double._compiled is double.function


def test_a_compiled_function_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: fail)
    monkeypatch.setattr(fusion, "_has_large", lambda *_: True)
    with pytest.raises(torch.OutOfMemoryError):
        Fused(lambda x: 2 * x)(torch.ones(1))
