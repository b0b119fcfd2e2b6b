"""Where the time of a GRPO step goes on a GPU: `python -m tests.gpu.profile steps|passes MODEL [OPTIONS]`.

`steps` trains as `tests.gpu.bench step` does and prints the seconds of each step's phases, with what torch.compile made
in it, then the kernels of one rollout, those of one update, and the operators of another (all are slower than without a
profiler). `passes` samples with TorchEngine's decoder and sampler, by the number of rows: milliseconds and kernels of a
decode step; then with the whole engine; then it makes updates, by the number of tokens. The last line sums up. Without
a GPU it runs on the CPU, in float32, where no kernels are counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.bench import SAMPLES, Work, rlkit_recipe

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if GPU else torch.device("cpu")
KIND = ProfilerActivity.CUDA if GPU else ProfilerActivity.CPU
PHASES = ("sample", "logps", "score", "update", "sync")
COUNTS = ("rollout/tokens", "update/tokens", "time/mfu", "engine/recorded", "engine/rows_peak")
ROWS = (16, 64, 128, 256, 512)
GROUPS = (1, 4, 8)
"""Groups of an update, each a prompt and 8 completions of 300 tokens."""
PROMPT, WARM, TIMED, PROFILED = 120, 16, 50, 40
"""Decode steps end within the columns of one recording."""


class DeviceWork(NamedTuple):
    """What a device did during some work: kernels, and the milliseconds that it was busy."""

    kernels: int
    busy: float


class Kernels:
    """Counts the kernels of a span; `stop` prints the longest."""

    def __init__(self) -> None:
        self._profiler = profile(activities=[KIND])
        synchronize()
        self._profiler.start()
        self._start = time.perf_counter()

    @staticmethod
    def prepare() -> None:
        """Start the profiler once, before any CUDA graph is recorded."""
        with profile(activities=[KIND]):
            synchronize()

    def stop(self, title: str, rows: int = 40, times: int = 1) -> DeviceWork:
        """Print and return kernels and milliseconds, divided by `times`."""
        synchronize()
        wall = (time.perf_counter() - self._start) * 1e3
        self._profiler.stop()
        found = [event for event in self._profiler.key_averages() if event.self_device_time_total]
        found.sort(key=lambda event: -event.self_device_time_total)
        count, busy = sum(event.count for event in found), sum(event.self_device_time_total for event in found) / 1e3
        print(
            f"\n{title}: {wall / times:.2f} ms, {busy / times:.2f} ms of them in {count / times:.0f} kernels"
            + (f", each a mean of {times}" if times > 1 else "")
        )
        for event in found[:rows]:
            took = event.self_device_time_total / 1e3
            print(f"{took / times:10.3f} ms {took / busy:5.1%} {event.count / times:9.1f} x  {event.key[:110]}")
        sys.stdout.flush()
        return DeviceWork(round(count / times), busy / times)


def synchronize() -> None:
    if GPU:
        torch.cuda.synchronize()


def autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cuda", torch.bfloat16) if GPU else nullcontext()


def compiled() -> tuple[int, float]:
    """Return how many graphs torch.compile has made in this process, and the seconds that took; -1 if unknown."""
    from torch._dynamo import utils

    try:
        seconds = utils.compilation_time_metrics.get("_compile.compile_inner", [])
        return int(utils.counters["stats"]["unique_graphs"]), float(sum(seconds))
    except (AttributeError, KeyError, TypeError):
        return -1, -1.0


def attempt(name: str, work: Callable[[], str]) -> str:
    """Return what some work says, or why it failed; its traceback is printed."""
    try:
        return work()
    except Exception as error:
        traceback.print_exc(file=sys.stdout)
        return f"{name} failed with {type(error).__name__}"


def steps(given: argparse.Namespace) -> str:
    """Train, and print what each step took."""
    from rlkit import fit
    from rlkit.interfaces.callback import Callback, RolloutsEnd, RunStart, StepEnd, TrainingBatch

    work = Work(given.model, given.prompts, given.length, given.steps)
    rows: list[dict[str, float]] = []

    class Watch(Callback):
        budgets = dict.fromkeys(Callback.budgets, 120.0)
        kernels: Kernels | None = None
        operators: Any = None
        start = 0.0

        def on_run_start(self, event: RunStart) -> None:
            Kernels.prepare()
            self.made, self.start = compiled(), time.perf_counter()

        def on_rollouts(self, event: RolloutsEnd) -> None:
            if self.kernels is not None:
                self.kernels.stop(f"rollout of step {event.step}")
                self.kernels = None

        def on_batch(self, event: TrainingBatch) -> None:
            self.sampled = compiled()
            if event.step == work.steps - 1:
                self.kernels = Kernels()
            if event.step == work.steps:
                self.operators = profile(activities={ProfilerActivity.CPU, KIND})
                self.operators.start()

        def on_step_end(self, event: StepEnd) -> None:
            seconds, made = time.perf_counter() - self.start, (self.made, self.sampled, compiled())
            if self.kernels is not None:
                self.kernels.stop(f"update and sync of step {event.step}")
                self.kernels = None
            if self.operators is not None:
                synchronize()
                self.operators.stop()
                found = self.operators.key_averages()
                for order in ("self_cuda_time_total", "self_cpu_time_total") if GPU else ("self_cpu_time_total",):
                    print(f"\noperators of the update and sync of step {event.step}, by {order}")
                    print(found.table(sort_by=order, row_limit=40, max_name_column_width=60))
                self.operators = None
            rows.append({"seconds": seconds, **event.metrics})
            print(
                f"step {event.step}: {seconds:.2f} s ("
                + ", ".join(f"{name} {event.metrics.get(f'time/{name}', 0):.2f}" for name in PHASES)
                + "), compiled "
                + " and ".join(f"{b[0] - a[0]} graphs in {b[1] - a[1]:.1f} s" for a, b in pairwise(made))
                + " before and in the update, "
                + ", ".join(f"{name} {event.metrics[name]:.4g}" for name in COUNTS if name in event.metrics),
                flush=True,
            )
            if event.step == work.steps - 2:
                self.kernels = Kernels()
            self.made, self.start = compiled(), time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        fit(rlkit_recipe(work, Watch()), out=Path(folder) / "run", quiet=True)
    updates = ", ".join(f"{row['time/update']:.2f}" for row in rows)
    last = rows[-3] if len(rows) > 2 else rows[-1]  # the last one without a profiler
    return (
        f"updates {updates} s; step {len(rows[:-2]) or 1}: {last['seconds']:.2f} s, sample {last['time/sample']:.2f}, "
        f"update {last['time/update']:.2f}, MFU {last.get('time/mfu', float('nan')):.2f}, peak "
        f"{last.get('memory/peak_device_mb', 0.0) / 1024:.1f} GiB"
    )


def decode(model: Any, rows: int) -> str:
    """Print and return what a decode step of so many rows takes, from tokens to tokens, as TorchEngine makes it."""
    from rlkit_engine_torch.batch import DecodeBatch, Row
    from rlkit_engine_torch.fused import FusedDecoder
    from rlkit_engine_torch.graphs import GraphDecoder

    from rlkit.types import Request, SampleKey, Sampling

    decoder = (GraphDecoder if GPU else FusedDecoder)(model, autocast)
    batch = DecodeBatch(DEVICE, decoder.record)
    prompts = [[3 + i, *range(4, PROMPT + 3)] for i in range(max(1, rows // SAMPLES))]
    request = Request((3,) * PROMPT, Sampling(max_tokens=10**4), SampleKey(0, 0, "", 0), session="")
    marks = [clock()]

    def sample(count: int) -> float:
        """Make steps; return the milliseconds of one."""
        start = clock()
        for _ in range(count):
            batch.sample(decoder.step(batch.last), 0)
        return (clock() - start) / count * 1e3

    try:
        logits = decoder.admit(prompts, [rows // len(prompts)] * len(prompts))
        batch.add([Row(request, 10**6, frozenset({7}), None, i) for i in range(decoder.rows)])  # type: ignore[arg-type]
        batch.sample(logits, 0)
        marks.append(clock())
        sample(1)
        marks.append(clock())
        sample(WARM)
        step = sample(TIMED)
        kernels = Kernels()
        sample(PROFILED)
        done = kernels.stop(f"decode step of {rows} rows", 25 if rows in ROWS[1::2] else 0, PROFILED)
        admitted, first = (1e3 * (end - start) for start, end in pairwise(marks))
        print(
            f"{rows} rows: {step:.2f} ms a step, {done.busy:.2f} of them in {done.kernels} kernels; admitted in "
            f"{admitted:.0f} ms, first step {first:.0f} ms; "
            + ", ".join(f"{name} {gauge:.2f}" for name, gauge in decoder.health().items()),
            flush=True,
        )
    finally:
        decoder.release()
        decoder.refresh()
    return f"{rows}: {step:.2f} ({done.busy:.2f} busy, {done.kernels})"


def clock() -> float:
    synchronize()
    return time.perf_counter()


def sample_all(model: Any, rows: int, length: int) -> str:
    """Print and return the milliseconds of a decode step of the whole engine, its prompts' passes included."""
    from rlkit.engines import TorchEngine
    from tests.bench.generate import ours, requests

    engine = TorchEngine()
    engine.bind(
        SimpleNamespace(  # type: ignore[arg-type]
            policy=model, device=DEVICE, context=4096, stop_ids=frozenset({model.config.vocab_size}),
            autocast=autocast, unsharded=nullcontext, tensor_parallel=1,
        )
    )  # fmt: skip
    found = []
    for seed in range(3):
        wanted = requests(seed, length, 2, samples=rows // 16)
        start = clock()
        tokens = sum(map(len, ours(engine, wanted)))
        found.append(clock() - start)
    engine.close()
    took = min(found)
    print(
        f"engine, {len(wanted)} rows x {length}: {', '.join(f'{seconds:.2f}' for seconds in found)} s, "
        f"{tokens / took:,.0f} tokens a second, {took / length * 1e3:.2f} ms a step; "
        + ", ".join(f"{name} {gauge:.2f}" for name, gauge in engine.health().items()),
        flush=True,
    )
    return f"engine {rows}: {took / length * 1e3:.2f}"


def update(model: Any, groups: int) -> str:
    """Print and return the MFU of a pass over groups with its gradient, and of the optimizer's step."""
    from rlkit.models.flops import LearningWork, peak_flops
    from tests.bench.predict_passes import LENGTH, learn
    from tests.bench.predict_passes import PROMPT as BEFORE

    parts, found = learn(model, autocast, groups), {}
    start = clock()
    parts["update"]()
    first = clock() - start
    for name in ("log-prob pass", "update", "optimizer step"):
        parts[name]()
        times = []
        for _ in range(3):
            start = clock()
            parts[name]()
            times.append(clock() - start)
        found[name] = statistics.median(times)
    model.zero_grad(set_to_none=True)
    work, rows = LearningWork.of(model), groups * SAMPLES
    peak = peak_flops(torch.cuda.get_device_name(), half=True) if GPU else None
    flops = work.flops(torch.full((rows,), BEFORE + LENGTH), rows * LENGTH) if work else float("nan")
    mfu = flops / found["update"] / (peak or float("nan"))
    print(
        f"update of {rows * (BEFORE + LENGTH)} tokens: first {first:.2f} s, "
        + ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in found.items())
        + f", {flops / 1e12:.1f} TFLOP, MFU {mfu:.3f}",
        flush=True,
    )
    return f"{rows * (BEFORE + LENGTH)}: {mfu:.2f}"


def passes(given: argparse.Namespace) -> str:
    """Measure decode steps, the engine and updates of the model."""
    from transformers import AutoModelForCausalLM

    from rlkit.distributed.kernels import choose_kernels

    choose_kernels()
    Kernels.prepare()
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32).to(DEVICE).eval()
    decoded = [attempt(f"{rows} rows", lambda rows=rows: decode(model, rows)) for rows in given.rows]  # type: ignore[misc]
    decoded += [
        attempt("engine", lambda rows=rows: sample_all(model, rows, given.length))  # type: ignore[misc]
        for rows in given.engine_rows
    ]
    updates = [attempt(f"{groups} groups", lambda groups=groups: update(model, groups)) for groups in given.groups]  # type: ignore[misc]
    if given.groups:
        kernels = Kernels()
        attempt("profile", lambda: update(model, given.groups[-1]))
        kernels.stop(f"passes over {given.groups[-1]} groups: 6 updates, 4 of the others")
    return f"ms a step by rows: {', '.join(decoded)}; MFU by tokens: {', '.join(updates)}"


def main(argv: Sequence[str]) -> int:
    """Measure a part; return the exit status: 1 if something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["steps", "passes"])
    parser.add_argument("model", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--engine-rows", type=int, nargs="*", default=[64, 128])
    parser.add_argument("--groups", type=int, nargs="*", default=list(GROUPS))
    given = parser.parse_args(argv)
    said = attempt(given.part, lambda: {"steps": steps, "passes": passes}[given.part](given))
    print(f"\n{said}")
    return int(" failed with " in said)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
