"""The counts and times of the bench that predicts a GPU's: worked by hand for small functions."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from rlkit.ops.fusion import softmax_statistics
from rlkit.types import Reads
from tests.bench.ghost_gpu import GhostGpu, record
from tests.bench.predict_passes import decode, learn, make_model, measure
from tests.bench.predict_rollout import trace
from tests.bench.roofline import Clock, Costs, Meter, Rates

RATES = Rates(
    bandwidth=1000.0, half=100.0, full=10.0, launch=1.0, kernel=0.5, replay=2.0, record=3.0, sync=5.0, link=1e9
)


def costs(gpu: GhostGpu) -> tuple[int, float, float, int, int]:
    total = gpu.clock.total
    return total.launches, total.flops, total.bytes, total.syncs, total.allocations


def test_a_product_and_a_sum_are_counted() -> None:
    """[2,3] by [3,4]: 2*2*3*4 operations; 24 and 48 bytes read, 32 written. Views cost nothing, nor does `empty`."""
    meter = Meter(Clock(RATES))
    x, y = torch.ones(2, 3), torch.ones(3, 4)
    with meter:
        product = x @ y
        torch.empty(5)
        product.view(-1)[2:].add_(1)  # 6 elements, in place: read, and written
    total = meter.clock.total
    assert (total.launches, total.flops, total.bytes) == (2, 48, 24 + 48 + 32 + 2 * 24)
    assert total.allocations == 2  # `empty` too
    assert total.device == 4.8 + 0.5  # by products in float32, and the least of a kernel


def test_gathered_rows_and_repeated_elements_count_once() -> None:
    """A row of 4 floats by an index of 8 bytes: 8 + 16 read, 16 written; of a broadcast float: 4 and 400."""
    meter = Meter(Clock(RATES))
    table, index, one = torch.ones(100, 4), torch.tensor([7]), torch.ones(1)
    with meter:
        table[index]
        one.expand(100).clone()
    assert meter.clock.total.bytes == 8 + 16 + 16 + 4 + 400


def test_the_host_runs_ahead_of_the_device_until_it_waits() -> None:
    """Two kernels of 10 s: launched at 1 and 2 s, done at 11 and 21 s; the host waits until then, and 5 s more."""
    clock = Clock(RATES)
    for _ in range(2):
        clock.kernel(0.0, 10_000.0)
    assert (clock.total.seconds, clock.ready, clock.total.device) == (2.0, 21.0, 20.0)
    clock.sync()
    assert (clock.total.seconds, clock.total.syncs) == (26.0, 1)


def test_a_graph_is_one_launch_of_all_its_kernels() -> None:
    clock = Clock(RATES)
    replay = record(clock, lambda: clock.kernel(0.0, 10_000.0, count=4))  # type: ignore[arg-type, return-value]
    assert clock.total == Costs(host=12.0, seconds=12.0)  # 4 kernels of 3 s to record
    replay()
    total = clock.total
    assert (total.replays, total.launches, total.kernels, total.seconds, clock.ready) == (1, 0, 4, 14.0, 24.0)


def test_floats_on_the_gpu_have_no_numbers_and_integers_do() -> None:
    gpu = GhostGpu()
    with gpu.running():
        x, index = torch.ones(3, 4, device="cuda"), torch.arange(3, device="cuda")
        before = costs(gpu)
        y = linear(x, x)[index[index > 0]]
        assert (y.device.type, y.is_cuda, tuple(y.shape)) == ("cuda", True, (2, 3))
        assert index.tolist() == [0, 1, 2]
        assert float(y.sum()) == 0.0
    launches, flops, _, syncs, _ = (b - a for a, b in zip(before, costs(gpu), strict=True))
    assert flops == 2 * 3 * 4 * 3
    assert launches == 1 + 1 + 3 + 1 + 1  # product, comparison, the mask's indices, rows, sum
    assert syncs == 3  # the mask, the list, the number


def test_autocast_converts_the_inputs_of_products() -> None:
    gpu = GhostGpu()
    with gpu.running(), gpu.autocast():
        x = torch.ones(3, 4, device="cuda")
        assert (linear(x, x).dtype, (x + x).dtype) == (torch.bfloat16, torch.float32)


def test_the_gradient_of_a_product_takes_two() -> None:
    gpu = GhostGpu()
    with gpu.running():
        x, weight = (torch.ones(4, 4, device="cuda").requires_grad_() for _ in range(2))
        linear(x, weight).sum().backward()
        assert weight.grad is not None
        assert weight.grad.is_cuda
    assert gpu.clock.total.flops == 3 * 2 * 4**3


def test_completions_of_one_length_are_replayed() -> None:
    """199 steps after the prefill: 128 columns and 71 more are recorded at their first step; each has its price."""
    price = {"prefill": Costs(), "decode step": Costs(kernels=10, device=1.0), "sampling": Costs()}
    metrics = trace({(rows, own): price for rows in (64, 256) for own in (64, 512)}, [200] * 8, 262_144)
    assert metrics["steps"] == 199
    assert metrics["replayed"] == (127 + 70) / 199
    assert metrics["device"] == 199 + 2  # both recordings are replayed once as a check


@pytest.mark.parametrize(("elements", "kernels", "moved"), [(10, 1, 40 + 16 + 5 * 8), (11, 40, 1304)])
def test_a_compiled_function_is_one_kernel(
    elements: int, kernels: int, moved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits [2,5] f32 and targets [2] i64 are read, five statistics [2] are written.

    The function runs operator by operator if the logits have fewer elements than are worth its compilation.
    """
    monkeypatch.setattr(softmax_statistics, "min_elements", elements)
    gpu = GhostGpu()
    with gpu.running():
        logits, targets = torch.ones(2, 5, device="cuda"), torch.arange(2, device="cuda")
        before = costs(gpu)
        softmax_statistics(logits, targets, 1.0, Reads(squares=True, mean=True), False)
    launches, _, size, syncs, _ = (b - a for a, b in zip(before, costs(gpu), strict=True))
    assert (launches, size, syncs) == (kernels, moved, 0)


def test_a_layer_takes_few_kernels() -> None:
    """A decode step of 16 rows 18 a layer; a pass with its gradient 58: 21 products, 10 weights converted, 4 sums.

    Further ones add the gradients of 12 weights. The sums are those of biases' gradients, and with the residual stream.
    """
    counts = []
    for layers in (1, 2):
        gpu, model = GhostGpu(), make_model("0.5B", layers)
        with gpu.running():
            works = decode(model, gpu.autocast, 2, 40) | learn(model, gpu.autocast, 2)
            works["prefill"]()
            counts.append([measure(works[name], gpu).kernels for name in ("decode step", "update", "further update")])
    assert [two - one for one, two in zip(*counts, strict=True)] == [18, 58, 70]


def test_the_waits_of_a_prefill_do_not_grow_with_layers() -> None:
    """Nor those of copying the weights before it."""
    waits = []
    for layers in (1, 3):
        gpu, model = GhostGpu(), make_model("tiny", layers)
        with gpu.running():
            decode(model, gpu.autocast, 2, 3)["prefill"]()
        waits.append(gpu.clock.total.syncs)
    assert waits[0] == waits[1] > 0
