"""Measures what a step costs on this machine, part by part, for the model of `step_model.py`.

Seconds are of one thread: those of the clock where a part runs alone, else those of the CPU. Each is the least of
several rounds, since other work only adds to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean, median
from types import SimpleNamespace
from typing import Any

from tests.bench.step import ROOT, cpu_seconds
from tests.bench.step_model import DecodeCost, Linear

ROUNDS = 3
CONVERSATIONS = 256
SHORT, LONG = 8, 512
"""Tokens of completions, between which a cost by token is taken."""

COLLECTIVES = 30
GRADIENTS = 2_100_000
"""Bytes of the gradients of the shipped model `tiny`."""

HOLD_OUT = (8, 64)
"""Prompts of the steps from which the costs of an update are taken; the validation has another number."""

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}


def line(short: float, long: float, small: float = SHORT, large: float = LONG) -> Linear:
    """Return the line through two measurements."""
    each = max((long - short) / (large - small), 0.0)
    return Linear(max(short - each * small, 0.0), each)


def least(measure: Callable[[], float]) -> float:
    """Return the least of several measurements."""
    return min(measure() for _ in range(ROUNDS))


def tiny() -> tuple[Any, Any]:
    """Return the shipped model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(ROOT / "rlkit" / "models" / "tiny")
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


# event loop


def conversations(engine: Any, tokenizer: Any, prompt: str, count: int = CONVERSATIONS) -> tuple[float, Sequence[Any]]:
    """Return the CPU seconds of a conversation on the event loop, scoring included, and the trajectories."""
    from rlkit.rewards import MathReward
    from rlkit.rollout.collect import ConversationSetup, collect
    from rlkit.rollout.scoring import score
    from rlkit.rollout.template import ChatTemplate
    from rlkit.rollout.workers import Workers
    from rlkit.types import Prompt, Sampling, Trajectory

    setup = ConversationSetup(
        engine, ChatTemplate(tokenizer, {tokenizer.eos_token_id}), Sampling(max_tokens=LONG), 8, 0, 1
    )
    prompts = [(i, Prompt(str(i), [{"role": "user", "content": prompt}], answer="42")) for i in range(count // 8)]
    reward, workers = MathReward(), Workers(1)

    async def finish(group: list[Trajectory]) -> None:
        for trajectory, result in zip(group, await score(reward, group, workers), strict=True):
            trajectory.score = result

    async def play() -> tuple[float, list[Trajectory]]:
        start = time.thread_time()
        trajectories = await collect(setup, prompts, finish)
        return (time.thread_time() - start) / count, trajectories

    async def closing() -> tuple[float, list[Trajectory]]:
        try:
            return await play()
        finally:
            fleet = getattr(engine, "fleet", None)
            for server in fleet.servers if fleet is not None else ():
                await server.api.client.finish()

    try:
        return asyncio.run(closing())
    finally:
        workers.close()


def instant_engine(tokenizer: Any, tokens: int) -> Any:
    """Return an engine that answers at once, with so many tokens."""
    from rlkit.interfaces.engine import RolloutEngine
    from rlkit.types import Completion, StopReason

    ids = completion_ids(tokenizer, tokens)

    class Instant(RolloutEngine):
        def bind(self, runtime: Any) -> None: ...

        async def generate(self, request: Any) -> Completion:
            await asyncio.sleep(0)
            return Completion(list(ids), [-0.123456789] * len(ids), [1] * len(ids), StopReason.STOP)

        async def sync(self, stream: Any, version: int) -> None: ...

    return Instant()


def completion_ids(tokenizer: Any, tokens: int) -> list[int]:
    """Return a completion of so many tokens, digits and an end."""
    ids = tokenizer.encode("12" * tokens, add_special_tokens=False)[: tokens - 1]
    return [*ids, tokenizer.eos_token_id]


def loop_costs(tokenizer: Any) -> dict[str, Linear]:
    """Return the costs of an event loop before a request and after it, with an engine in the process and over HTTP."""
    few, many = "1+1=", "1+1=" * 128

    def cost(make: Callable[[int], Any], tokens: int, prompt: str) -> float:
        return least(lambda: conversations(make(tokens), tokenizer, prompt)[0])

    def instant(tokens: int) -> Any:
        return instant_engine(tokenizer, tokens)

    lengths = [len(tokenizer.encode(text)) for text in (few, many)]
    base = cost(instant, SHORT, few)
    request = line(base, cost(instant, SHORT, many), *lengths)
    reply = line(base, cost(instant, LONG, few))
    # what does not depend on the prompt is done half before the request, half after it
    costs = {"request": Linear(base / 2, request.each), "reply": Linear(base / 2 - reply.each * SHORT, reply.each)}
    with Servers(tokenizer) as servers:
        served = cost(servers.engine, SHORT, few)
        served_request = line(served, cost(servers.engine, SHORT, many), *lengths)
        served_reply = line(served, cost(servers.engine, LONG, few))
        costs["route"] = line(
            served, least(lambda: conversations(servers.engine(SHORT, 512), tokenizer, few)[0]), 1, 512
        )
    costs["served_request"] = Linear(served / 2, served_request.each)
    costs["served_reply"] = Linear(served / 2 - served_reply.each * SHORT, served_reply.each)
    return costs


SERVER = """
import json, sys
from aiohttp import web
replies = {int(n): text for n, text in json.load(open(sys.argv[1])).items()}
async def generate(request):
    await request.read()
    return web.Response(text=replies[int(request.match_info["n"])], content_type="application/json")
app = web.Application()
app.router.add_post("/{n}/generate", generate)
web.run_app(app, host="127.0.0.1", port=int(sys.argv[2]), print=None)
"""


class Servers:
    """A process that answers at once as an SGLang server does, and an engine that asks it."""

    def __init__(self, tokenizer: Any) -> None:
        from rlkit_servers.process import free_port

        self._folder = tempfile.TemporaryDirectory()
        self._port = free_port()
        replies = {n: json.dumps(sglang_reply(completion_ids(tokenizer, n))) for n in (SHORT, LONG)}
        file = Path(self._folder.name) / "replies.json"
        file.write_text(json.dumps(replies), encoding="utf-8")
        self._process = subprocess.Popen((sys.executable, "-c", SERVER, str(file), str(self._port)), env=ENVIRONMENT)
        self._tokenizer = tokenizer

    def __enter__(self) -> Servers:
        import socket

        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return self
            time.sleep(0.05)
        raise RuntimeError("the server does not answer")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()
        self._folder.cleanup()

    def engine(self, tokens: int, servers: int = 1) -> Any:
        """Return an SGLangServer whose servers answer with so many tokens; only the first one is asked."""
        from rlkit_servers.states import ServerState

        from rlkit.engines import SGLangServer

        engine = SGLangServer(urls=["http://127.0.0.1:1"])
        config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(vocab_size=len(self._tokenizer)))
        runtime: Any = SimpleNamespace(
            context=1 << 20, stop_ids=frozenset({self._tokenizer.eos_token_id}), policy=SimpleNamespace(config=config),
            tokenizer=self._tokenizer,
        )  # fmt: skip
        engine.runtime = runtime
        engine.requests.bind(runtime)
        engine.weights.bind(runtime, None, "run")  # type: ignore[arg-type]
        engine.weights.version, engine.weights._stream = 0, object()  # type: ignore[assignment]
        connected = [engine.connect(f"http://127.0.0.1:{self._port}/{tokens}") for _ in range(servers)]
        for server in connected:
            server.state = ServerState.READY
        engine.fleet.owned = connected
        engine.fleet.use(connected, engine.endpoints(connected))
        return engine


def sglang_reply(ids: Sequence[int]) -> dict[str, Any]:
    """Return what SGLang answers for a completion."""
    meta = {
        "id": "0" * 32, "finish_reason": {"type": "stop", "matched": ids[-1]}, "prompt_tokens": 8,
        "completion_tokens": len(ids), "cached_tokens": 0, "weight_version": "run-0", "e2e_latency": 1.23456789,
        "output_token_logprobs": [[-0.1234567890123456 - i * 1e-6, token, None] for i, token in enumerate(ids)],
    }  # fmt: skip
    return {"text": "12" * len(ids), "output_ids": list(ids), "meta_info": meta}


# engine


def decode_cost(model: Any) -> DecodeCost:
    """Return the cost of decode steps of TorchEngine, by the number of rows, and of prompts."""
    import torch

    from rlkit.engines import TorchEngine
    from rlkit.types import Request, SampleKey, Sampling

    torch.set_num_threads(1)

    def seconds(rows: int, tokens: int, prompt: int = 16) -> float:
        async def generate() -> float:
            engine = TorchEngine()
            engine.bind(
                SimpleNamespace(
                    policy=model, device=torch.device("cpu"), context=512, stop_ids=frozenset(), autocast=nullcontext,
                    unsharded=nullcontext, tensor_parallel=1,
                )
            )  # fmt: skip
            prompts = [(5 + i % 100, *range(6, 5 + prompt)) for i in range(rows)]
            sampling = Sampling(max_tokens=tokens)
            requests = [Request(ids, sampling, SampleKey(0, 1, str(i), 0), str(i)) for i, ids in enumerate(prompts)]
            start = time.perf_counter()
            await asyncio.gather(*map(engine.generate, requests))
            spent = time.perf_counter() - start
            engine.close()
            return spent

        return least(lambda: asyncio.run(generate()))

    seconds(8, 4)  # the first steps allocate
    few, many = (8, 128)
    steps = [(seconds(rows, 20) - seconds(rows, 4)) / 16 for rows in (few, many)]
    per_row = line(*steps, few, many)
    prefill = (seconds(many, 2, 64) - seconds(many, 2, 16)) / (48 * 100)  # 100 of the prompts differ
    return DecodeCost(per_row.fixed, per_row.each, 0.0, max(prefill, 0.0), 256)


# trajectories


def trajectory_costs(tokenizer: Any) -> dict[str, Linear]:
    """Return the costs of packing and unpacking a trajectory as `Ranks.exchange` does, and its bytes."""
    measured: dict[str, list[float]] = {"pack": [], "unpack": [], "sent_bytes": []}
    for tokens in (SHORT, LONG):
        _, trajectories = conversations(instant_engine(tokenizer, tokens), tokenizer, "1+1=")
        packed = pickle.dumps(trajectories)
        measured["sent_bytes"].append(len(packed) / CONVERSATIONS)
        measured["pack"].append(least(lambda t=trajectories: timed(lambda: pickle.dumps(t))) / CONVERSATIONS)
        measured["unpack"].append(least(lambda p=packed: timed(lambda: pickle.loads(p))) / CONVERSATIONS)
    return {name: line(*pair) for name, pair in measured.items()}


def timed(work: Callable[[], object]) -> float:
    """Return the seconds that work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def agree_cost() -> Linear:
    """Return what a rank computes to share groups, by the number of ranks that have 8 groups each."""
    from rlkit.ops.batching import assign

    def seconds(ranks: int) -> float:
        sizes = [4000 + i * 7919 % 4000 for i in range(8 * ranks)]
        tokens = pickle.dumps(dict(enumerate(sizes[:8])))
        return least(lambda: timed(lambda: assign(sizes, ranks))) + least(
            lambda: timed(lambda: [pickle.loads(tokens) for _ in range(ranks)])
        )

    return line(seconds(64), seconds(1024), 64, 1024)


# collectives


def collectives(ranks: int) -> dict[str, float]:
    """Return the seconds of a reduction of gradients and of a gathered object, and bytes a second of an exchange."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        command = ("torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone", "-m", "tests.bench.step_costs")
        subprocess.run(
            (sys.executable, "-W", "ignore", "-m", *command[:3], *command[3:], str(out)),
            check=True, env=ENVIRONMENT, cwd=ROOT, capture_output=True,
        )  # fmt: skip
        result: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return result


def collectives_of_a_step(folder: Path, steps: int = 6) -> float:
    """Return how often a step of the quickstart gathers or reduces small values among ranks."""
    from rlkit.cli.main import main
    from rlkit.distributed.ranks import Ranks, SideGroup

    calls = 0

    def counted(owner: type, name: str) -> None:
        method = getattr(owner, name)

        def call(*args: Any, **more: Any) -> Any:
            nonlocal calls
            calls += 1
            return method(*args, **more)

        setattr(owner, name, call)

    for owner, names in ((Ranks, ("gather_dp", "gather_world", "all_reduce_max", "all_reduce_sum", "same", "exchange")),
                         (SideGroup, ("gather_world", "any_async"))):  # fmt: skip
        for name in names:
            counted(owner, name)
    counts = []
    for number in (steps, 2 * steps):
        before = calls
        main(["fit", "--recipe=quickstart", f"--train.steps={number}", "--train.prompts_per_step=4",
              "--validation=null", "--save.every=0", f"--out={folder / str(number)}"])  # fmt: skip
        counts.append(calls - before)
    return (counts[1] - counts[0]) / steps


def rank_of_collectives(out: Path) -> None:
    """Measure collectives on this rank; the first rank writes the medians."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    gradients, payload = torch.zeros(GRADIENTS // 4), torch.zeros(ranks * 2**20, dtype=torch.uint8)
    received, objects = torch.empty_like(payload), [None] * ranks

    def seconds(work: Callable[[], object]) -> float:
        times = []
        for _ in range(COLLECTIVES):
            dist.barrier()
            times.append(timed(work))
        return median(times)

    results = {
        "reduce": seconds(lambda: dist.all_reduce(gradients)),
        "object": seconds(lambda: dist.all_gather_object(objects, {1: 2})),
        "bandwidth": payload.numel() / seconds(lambda: dist.all_to_all_single(received, payload)),
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results), encoding="utf-8")
    dist.destroy_process_group()


# complete runs


class CpuClock(threading.Thread):
    """Notes the CPU seconds of a process with its children, and of the whole machine, until it is stopped."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid = pid
        self._notes: list[tuple[float, float, float]] = []
        self.stopped = threading.Event()

    def run(self) -> None:
        while not self.stopped.wait(0.1):
            fields = Path("/proc/stat").read_text(encoding="utf-8").split()
            machine = sum(int(fields[i]) for i in (1, 2, 3, 6, 7)) / os.sysconf("SC_CLK_TCK")
            self._notes.append((time.time(), cpu_seconds(self._pid), machine))

    def others(self, start: float, end: float) -> float:
        """Return the cores that other processes used between two times."""
        notes = [note for note in self._notes if start <= note[0] <= end]
        (first, own_first, all_first), (last, own_last, all_last) = notes[0], notes[-1]
        return max((all_last - all_first - own_last + own_first) / (last - first), 0.0)


def fit(out: Path, ranks: int, prompts: int, steps: int, *, save: bool = False) -> list[dict[str, float]]:
    """Train the quickstart; return the metrics of its steps, with the seconds between the files of rollouts.

    `cores others` are those that other processes used meanwhile.
    """
    options = [
        f"--train.steps={steps}", f"--train.prompts_per_step={prompts}", "--validation=null",
        f"--save.every={int(save)}", f"--fabric.devices={ranks}", f"--fabric.strategy={'ddp' if ranks > 1 else 'auto'}",
        f"--out={out}",
    ]  # fmt: skip
    command = [sys.executable, "-m", "rlkit", "fit", "--recipe", "quickstart", *options]
    process = subprocess.Popen(command, env=ENVIRONMENT, cwd=out.parent, stdout=subprocess.DEVNULL)
    clock = CpuClock(process.pid)
    clock.start()
    if process.wait():
        raise SystemExit(f"{command} failed")
    clock.stopped.set()
    lines = (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(text) for text in lines if "time/sample" in text]
    written = [(out / "rollouts" / f"step-{i + 1:05}.jsonl.gz").stat().st_mtime for i in range(steps)]
    others = clock.others(written[2], written[-1])
    for i, row in enumerate(rows[1:], 1):
        row |= {"seconds": written[i] - written[i - 1], "cores others": others}
    return rows


def middle(rows: Sequence[dict[str, float]], name: str, skip: int = 3) -> float:
    """Return the median of a metric, the first steps left out."""
    return median(row[name] for row in rows[skip:])


def run_costs(folder: Path, steps: int = 12) -> dict[str, Any]:
    """Return the costs of update, sync and record from runs of one process, and of a checkpoint."""
    runs = {prompts: fit(folder / f"prompts{prompts}", 1, prompts, steps) for prompts in HOLD_OUT}
    tokens = [middle(runs[prompts], "update/tokens") for prompts in HOLD_OUT]
    phases = ("sample", "logps", "score", "update", "sync")

    def rest(rows: Sequence[dict[str, float]]) -> float:
        return median(row["seconds"] - sum(row[f"time/{phase}"] for phase in phases) for row in rows[3:])

    rests = [rest(runs[prompts]) for prompts in HOLD_OUT]
    saving = fit(folder / "saving", 1, HOLD_OUT[0], steps, save=True)
    return {
        "update": line(*(middle(runs[p], "time/update") for p in HOLD_OUT), *tokens),
        "record": line(*rests, *(8 * p for p in HOLD_OUT)),
        "sync": fmean(middle(runs[p], "time/sync") for p in HOLD_OUT),
        "checkpoint": max(rest(saving) - rests[0], 0.0),
    }


def measure(note: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure all costs on this machine."""
    model, tokenizer = tiny()
    costs: dict[str, Any] = {}
    costs |= loop_costs(tokenizer)
    note("event loop")
    costs |= trajectory_costs(tokenizer)
    costs["agree"] = agree_cost()
    note("trajectories")
    costs["decode"] = decode_cost(model)
    note("decode")
    costs["collectives"] = {str(ranks): collectives(ranks) for ranks in (2, 4)}
    note("collectives")
    with tempfile.TemporaryDirectory() as folder:
        costs |= run_costs(Path(folder))
        costs["collectives a step"] = collectives_of_a_step(Path(folder))
    return costs


if __name__ == "__main__":
    rank_of_collectives(Path(sys.argv[1]))
