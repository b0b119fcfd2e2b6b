"""What a GRPO step should take on an H100: `python -m tests.bench.predict [passes] [kernels] [step] [cpu] [gpu]`.

`passes` runs rlkit's own decode step, prefill, log-prob pass and update on a GPU without numbers (`ghost_gpu.py`),
with one and two layers of Qwen2.5-0.5B and of 7B with LoRA; further layers cost what the second does. `kernels` counts
those of decode steps and of the update that `tests.gpu.profile steps` measures. `step` also runs
the scheduler, row by row, and prints where the seconds of a step go. `cpu` holds the same counts, at this machine's own
rates, against what a small model takes here. `gpu` runs the passes of `passes` on the GPU of this machine.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from rlkit_inspect.gpus import GPUS, H100

from rlkit.commands import parse
from rlkit.models.activations import token_limit
from rlkit.models.size import cache_tokens
from tests.bench.predict_passes import (
    MICRO_GROUPS,
    PROMPT,
    PROMPTS,
    SAMPLES,
    SHAPES,
    decode,
    learn,
    make_model,
    predict,
)  # fmt: skip
from tests.bench.predict_rollout import completion_lengths, decode_prices, server_rollout, trace
from tests.bench.roofline import Clock, Costs, Meter, Rates

LAUNCH_ON_H200 = 45e-6
"""Seconds of Python and launch for a kernel on the host of an H200, a virtual machine: measured, see RESULTS.md."""


def passes(name: str) -> dict[str, Costs]:
    """Print and return the costs of all passes."""
    costs = predict(name, lambda model, cast: decode(model, cast, 32, 160) | learn(model, cast, MICRO_GROUPS))
    for key, cost in costs.items():
        print(
            f"| {name} | {key} | {cost.kernels:.0f} | {cost.bytes / 1e9:.2f} | {cost.flops / 1e12:.2f} | "
            f"{cost.syncs:.0f} | {cost.allocations:.0f} | {cost.device * 1e3:.1f} | {cost.host * 1e3:.1f} | "
            f"{cost.seconds * 1e3:.1f} |",
            flush=True,
        )
    return costs


def kernels_table(name: str) -> None:
    """Print what decode steps of some rows and an update of 16 groups of answers of 256 tokens take."""
    for rows in (16, 64, 256):
        costs = predict(name, lambda model, cast, n=rows: decode(model, cast, n // SAMPLES, 160))
        for key in ("decode step", "sampling"):
            print_kernels(f"{key}, {rows} rows", costs[key])
    recipe, length = parse("fit", ["--recipe=grpo_gsm8k"]).recipe, 256
    for gpu in (H100, GPUS["h200"]):
        limit = token_limit(recipe, gpu.memory)
        most = limit // (PROMPT + SAMPLES * length)
        micros = [min(most, 16 - start) for start in range(0, 16, most)]
        update = Costs()
        for i, groups in enumerate(micros):
            works = predict(name, lambda m, cast, n=groups: learn(m, cast, n, length))
            update = update.plus(works["further update" if i else "update"])
        print_kernels(f"update in micro-batches of {micros} groups, {limit} tokens at most, {gpu.name}", update)


def print_kernels(name: str, costs: Costs) -> None:
    print(
        f"| {name} | {costs.kernels:,.0f} | {costs.kernels * LAUNCH_ON_H200 * 1e3:.0f} | {costs.device * 1e3:.2f} |",
        flush=True,
    )


def step_table(name: str) -> None:
    """Print where the seconds of a step go, and what the scheduler does with 2,000 completions."""
    lengths, prices = completion_lengths(PROMPTS * SAMPLES), decode_prices(name)
    costs = passes(name)
    cached = cache_tokens(make_model(name, SHAPES[name]["num_hidden_layers"]).config, 2, H100.memory)
    rollout = trace(prices, lengths, cached)
    learning = costs["update"].seconds * PROMPTS / MICRO_GROUPS + costs["optimizer step"].seconds
    for engine, seconds in (
        ("TorchEngine", rollout["seconds"]),
        ("SGLang beside, at least", server_rollout(name, lengths)),
    ):
        print(f"| {name} | {engine} | {seconds:.1f} | {learning:.1f} | {seconds + learning:.1f} |", flush=True)
    for count, metrics in ((len(lengths), rollout), (2000, trace(prices, completion_lengths(2000), cached))):
        print(f"{count} completions: {', '.join(f'{key} {value:.3g}' for key, value in metrics.items())}", flush=True)


def cpu_rates() -> Rates:
    """Return this machine's rates on one thread, from single operators."""
    from tests.bench.step import product_rate

    many, target, small = torch.randn(2**24), torch.zeros(2**24), torch.zeros(16)
    heads, few, keys = torch.randn(8, 6, 300, 64), torch.randn(256, 3, 64), torch.randn(256, 100, 64).transpose(1, 2)
    attend, gradient = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
    forward, backward = (getattr(torch.ops.aten, kernel) for kernel in (attend, gradient))
    output, lse = forward(heads, heads, heads, 0.0, True)
    pairs = heads.numel() * heads.shape[2] / 2
    attention = 4 * pairs / cpu_seconds(lambda: forward(heads, heads, heads, 0.0, True))
    kinds = {
        "bmm": 2 * few.numel() * keys.shape[2] / cpu_seconds(lambda: few @ keys),
        attend: attention,
        "scaled_dot_product_attention": attention,
        gradient: 10 * pairs / cpu_seconds(lambda: backward(*[heads] * 4, output, lse, 0.0, True)),
    }
    products = product_rate(1.0)
    copied = 2 * many.nbytes / cpu_seconds(lambda: target.copy_(many))
    return Rates(
        copied, products, products, cpu_seconds(lambda: [small.add_(1) for _ in range(1000)]) / 1000, kinds=kinds
    )


def cpu_seconds(work: Callable[[], Any]) -> float:
    """Return the least CPU seconds of five runs."""
    seconds = []
    for _ in range(5):
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    return min(seconds)


def compare_here() -> None:
    """Print predicted and measured CPU seconds of the passes of a small model on this machine."""
    rates, model = cpu_rates(), make_model("10M", SHAPES["10M"]["num_hidden_layers"], "cpu")
    for key, work in (decode(model, nullcontext, 16, 40) | learn(model, nullcontext, 1)).items():
        work()
        meter = Meter(Clock(rates))
        with meter:
            work()
        predicted, measured = meter.clock.total.host + meter.clock.total.device, cpu_seconds(work)
        print(f"| 10M | {key} | {predicted:.3f} | {measured:.3f} | {predicted / measured:.2f} |", flush=True)


def compare_on_gpu(name: str) -> None:
    """Print kernels and milliseconds of all passes, predicted for an H100 and measured on this GPU."""

    def make(model: Any, cast: Callable[[], Any]) -> dict[str, Callable[[], Any]]:
        return decode(model, cast, 32, 160) | learn(model, cast, MICRO_GROUPS)

    predicted, model = predict(name, make), make_model(name, SHAPES[name]["num_hidden_layers"], "cuda")
    for key, work in make(model, lambda: torch.autocast("cuda", torch.bfloat16)).items():
        costs = predicted[key]
        try:
            for _ in range(3):
                work()
        except torch.OutOfMemoryError:
            print(f"| {name} | {key} | out of memory |", flush=True)
            continue
        kernels, busy = device_work(work)
        print(
            f"| {name} | {key} | {costs.kernels:.0f} | {kernels} | {costs.device * 1e3:.1f} | {busy:.1f} | "
            f"{costs.seconds * 1e3:.1f} | {milliseconds(work):.1f} |",
            flush=True,
        )


def device_work(work: Callable[[], Any]) -> tuple[int, float]:
    """Return the kernels that some work launches on a GPU, and their milliseconds; print the ten longest."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = (event for event in profiler.key_averages() if event.self_device_time_total)
    kernels = sorted(events, key=lambda event: -event.self_device_time_total)
    for event in kernels[:10]:
        print(f"  {event.self_device_time_total / 1e3:8.2f} ms {event.count:6} {event.key[:100]}")
    return sum(event.count for event in kernels), sum(event.self_device_time_total for event in kernels) / 1e3


def milliseconds(work: Callable[[], Any]) -> float:
    """Return the median of the milliseconds that five runs on a GPU take."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main(parts: Sequence[str]) -> None:
    torch.set_num_threads(1)
    for part in parts or ("passes", "step", "cpu"):
        if part == "passes":
            passes("7B LoRA")
        elif part == "kernels":
            kernels_table("0.5B")
        elif part == "step":
            step_table("0.5B")
        elif part == "gpu":
            compare_on_gpu("0.5B")
            compare_on_gpu("7B LoRA")
        else:
            compare_here()


if __name__ == "__main__":
    main(sys.argv[1:])
