"""How a step scales: `python -m tests.bench.scaling [measure] [validate] [tables]`, in this order by default.

`measure` measures what the parts of a step cost on this machine, `validate` compares the model of `step_model.py` with
these costs to runs of the quickstart on 1, 2 and 4 processes, and `tables` prints what it says of 8 to 1,024 GPUs. The
first two write `scaling.json`, which `tables` and `rlkit docs scaling` are made from.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from tests.bench import step_costs
from tests.bench.step_model import Cluster, Costs, DecodeCost, Linear, Step, Workload, simulate

FILE = Path(__file__).with_name("scaling.json")
PROMPTS, SAMPLES, STEPS = 32, 8, 16
"""Of the runs that the model is compared with."""

# a Qwen2.5-7B in bfloat16
PARAMETERS = 7.62e9
CACHE_BYTES = 2 * 28 * 4 * 128 * 2
"""Of a token in the key-value cache: keys and values of 28 layers with 4 heads of 128, 2 bytes each."""
PROMPT, MEDIAN, SIGMA, MAX_TOKENS = 500, 900, 0.8, 8192
"""Tokens of a prompt; completions are log-normal, cut at the limit."""

# an H100 and its network
BANDWIDTH, FLOPS = 3.0e12, 798e12
"""Bytes and bfloat16 operations a second, as measured on one."""
UTILISATION = 0.4
STEP_SECONDS = 3e-3
"""Of a decode step beside reading weights and cache."""
NODE, NVLINK = 50e9, 450e9
"""Bytes a second of a node's network (400 Gb/s), and of a GPU within a node."""
HOP = 30e-6
"""Seconds of a message between two nodes over TCP; gloo gathers in a ring of such."""
BUCKET, CALLS = 2**30, 5
"""Bytes of weights in a bucket of float32, each of which is a request to every server; further requests of a sync."""
OPERATIONS = 8
"""Of an update for each weight and token, with recomputed activations."""
HOST = 10e9
"""Bytes a second of a copy to host memory, for which training waits at a checkpoint."""

ROWS = ((8, 512), (32, 512), (128, 512), (128, 8192), (512, 8192), (1024, 8192))
"""GPUs, half of which train and half of which serve, and completions of a step."""


def load() -> dict[str, Any]:
    """Return what was measured."""
    content: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return content


def save(**parts: Any) -> None:
    """Replace parts of what was measured."""
    content = load() if FILE.exists() else {}
    content |= parts
    FILE.write_text(json.dumps(content, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def here(measured: dict[str, Any], ranks: int) -> Costs:
    """Return the costs of the quickstart on this machine, with TorchEngine in the ranks' processes."""
    parts = {name: Linear(**measured[name]) for name in ("request", "reply", "pack", "unpack", "sent_bytes")}
    collective = measured["collectives"].get(str(ranks), {"reduce": 0.0, "object": 0.0, "bandwidth": 1e9})
    return Costs(
        decode=DecodeCost(**measured["decode"]), **parts, agree=Linear(**measured["agree"]),
        update=Linear(**measured["update"]), reduce=collective["reduce"], sync=measured["sync"],
        record=Linear(**measured["record"]), collectives=measured["collectives a step"] * collective["object"],
        bandwidth=collective["bandwidth"],
    )  # fmt: skip


def on_gpus(measured: dict[str, Any], ranks: int, servers: int) -> Costs:
    """Return the costs of a 7B model on H100s: of event loops and trajectories as measured, others as stated above."""
    lines = {name: Linear(**measured[name]) for name in ("served_request", "served_reply", "agree", "record", "route")}
    request, reply = lines["served_request"], lines["served_reply"]
    request = replace(request, fixed=request.fixed + lines["route"].each * servers)
    gathered = 2 * (ranks - 1) * HOP
    flops = UTILISATION * FLOPS
    link = NODE if ranks > 8 else NVLINK
    read = 2 * PARAMETERS / BANDWIDTH
    calls = (4 * PARAMETERS / BUCKET + CALLS) * servers
    return Costs(
        decode=DecodeCost(STEP_SECONDS + read, 0.0, CACHE_BYTES / BANDWIDTH, 2 * PARAMETERS / flops, 256),
        request=request,
        reply=reply,
        pack=Linear(**measured["pack"]),
        unpack=Linear(**measured["unpack"]),
        sent_bytes=Linear(**measured["sent_bytes"]),
        agree=Linear(gathered, lines["agree"].each),
        update=Linear(0.0, OPERATIONS * PARAMETERS / flops),
        reduce=3 * 2 * PARAMETERS / link,  # weights gathered twice, gradients reduced once, in bfloat16
        sync=4 * PARAMETERS / link + 2 * PARAMETERS / NODE + calls * (lines["served_request"].fixed + reply.fixed),
        record=lines["record"],
        collectives=measured["collectives a step"] * gathered,
        checkpoint=12 * PARAMETERS / ranks / HOST,
        bandwidth=NODE / 8,
    )


def completions(count: int, seed: int = 0) -> list[list[int]]:
    """Return lengths of completions, by prompt."""
    rng = random.Random(seed)
    return [
        [min(MAX_TOKENS, 1 + int(MEDIAN * rng.lognormvariate(0.0, SIGMA))) for _ in range(8)] for _ in range(count // 8)
    ]


def simulate_gpus(measured: dict[str, Any], gpus: int, count: int, *, turns: int = 1, trainers: int = 0) -> Step:
    """Return a step of so many completions on GPUs, half of which train unless their number is given."""
    ranks = trainers or gpus // 2
    servers = gpus - ranks
    work = Workload(PROMPT, completions(count), turns, checkpoint_every=20)
    return simulate(Cluster(ranks, servers, ranks), on_gpus(measured, ranks, servers), work)


# comparison with runs


def validate() -> None:
    """Run the quickstart on 1, 2 and 4 processes, and store what the model says and what was measured."""
    measured = load()["costs"]
    results = {}
    for ranks in (1, 2, 4):
        actual, work = _run(ranks)
        step = simulate(Cluster(ranks, 0, actual["cores"]), here(measured, ranks), work)
        model = {"sample": step.sample + step.gather, "update": step.update, "seconds": step.seconds}
        results[str(ranks)] = {"model": model, "measured": actual}
        print(ranks, results[str(ranks)], flush=True)
    save(validation=results)


def _run(ranks: int) -> tuple[dict[str, float], Workload]:
    """Return the seconds of a run's steps, the cores that other processes left it, and conversations like its own."""
    from rlkit.records.rows import read_rows

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        rows = step_costs.fit(out, ranks, PROMPTS, STEPS)
        files = sorted((out / "rollouts").glob("step-*.gz"))[3:]
        kept = [saved.trajectory for file in files for saved in read_rows(file)]
    actual = {name: step_costs.middle(rows, f"time/{name}") for name in ("sample", "update")}
    actual["seconds"] = step_costs.middle(rows, "seconds")
    actual["cores"] = (os.cpu_count() or 1) - step_costs.middle(rows, "cores others")
    rng, lengths = random.Random(0), [trajectory.response_length for trajectory in kept]
    groups = [rng.choices(lengths, k=SAMPLES) for _ in range(PROMPTS)]
    prompt = round(fmean(len(trajectory.tokens) - trajectory.response_length for trajectory in kept))
    return actual, Workload(prompt, groups)


# tables


def tables(content: dict[str, Any]) -> Iterator[list[str]]:
    """Yield the tables of `rlkit docs scaling`, as lines of Markdown."""
    yield list(_validation(content["validation"]))
    yield list(_costs(content["costs"]))
    yield list(_gpus(content["costs"]))
    yield list(_agents(content["costs"]))


def _validation(results: dict[str, Any]) -> Iterator[str]:
    yield "| processes | cores | sample and gather | update | step | error of the step |"
    yield "|---|---|---|---|---|---|"
    for ranks, result in results.items():
        model, actual = result["model"], result["measured"]
        pairs = [f"{1e3 * model[name]:.0f} / {1e3 * actual[name]:.0f} ms" for name in ("sample", "update", "seconds")]
        error = model["seconds"] / actual["seconds"] - 1
        yield f"| {ranks} | {actual['cores']:.1f} | {' | '.join(pairs)} | {error:+.0%} |"


def _costs(costs: dict[str, Any]) -> Iterator[str]:
    request, reply = Linear(**costs["served_request"]), Linear(**costs["served_reply"])
    pack, unpack, sent = (Linear(**costs[name]) for name in ("pack", "unpack", "sent_bytes"))
    turn, each = 1e3 * (request.fixed + reply.fixed), 1e6 * reply.each
    moved = 1e6 * (pack.each + unpack.each)
    yield "| work of a rank's host | measured |"
    yield "|---|---|"
    yield f"| a turn on the event loop: render, HTTP, parse, score | {turn:.2f} ms and {each:.2f} µs a token |"
    yield f"| choice of a conversation's server | {1e6 * costs['route']['each']:.2f} µs for each server |"
    yield f"| a trajectory to another rank | {moved:.2f} µs and {sent.each:.0f} bytes a token |"
    yield f"| assignment of groups, 8 for each rank | {1e6 * costs['agree']['each']:.1f} µs for each rank |"
    yield f"| collectives of small values | {costs['collectives a step']:.0f} a step |"


def _gpus(costs: dict[str, Any]) -> Iterator[str]:
    names = "GPUs, completions, sample, gather, update, sync, other, step, servers busy, loops busy, tokens/s/GPU"
    yield f"| {names.replace(', ', ' | ')} |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for gpus, count in ROWS:
        step = simulate_gpus(costs, gpus, count)
        tokens = sum(map(sum, completions(count)))
        parts = (step.sample, step.gather, step.update, step.sync, step.record + step.checkpoint, step.seconds)
        shares = (step.servers_busy, step.loops_busy)
        cells = [f"{x:.1f}" if x >= 0.95 else f"{x:.2f}" for x in parts] + [f"{x:.1%}" for x in shares]
        yield f"| {gpus} | {count:,} | {' | '.join(cells)} | {tokens / step.seconds / gpus:,.0f} |"


def _agents(costs: dict[str, Any]) -> Iterator[str]:
    yield "| event loops | turns | sample | loop busy | servers busy |"
    yield "|---|---|---|---|---|"
    for trainers, turns in ((64, 1), (64, 20), (8, 1), (8, 20), (8, 50)):
        step = simulate_gpus(costs, trainers + 64, 8192, turns=turns, trainers=trainers)
        cells = f"{step.sample:.0f} s | {step.loops_busy:.0%} | {step.servers_busy:.0%}"
        yield f"| {trainers} | {turns} | {cells} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["measure", "validate", "tables"], metavar="PART")
    parts: Sequence[str] = parser.parse_args().parts
    if "measure" in parts:
        save(costs=step_costs.measure())
    if "validate" in parts:
        validate()
    if "tables" in parts:
        for rows in tables(load()):
            print(*rows, "", sep="\n")


if __name__ == "__main__":
    main()
