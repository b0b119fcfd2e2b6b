"""What 64 tenants of the Tinker service cost, and what 63 have beside one that floods it.

`PYTHONPATH=plugins/rlkit-tinker/src python -m tests.bench.tinker_tenants`, on a CPU. Of 64 tenants with adapters of
rank 8, each sends a pass of 4 rows and a step, waits for both and goes on; one has 16 passes of 64 rows and 8 requests
for 32 samples of 200 tokens always in flight. Printed are the steps of each tenant by the time when the first has made
10, without the flood and with it, and the peak of the memory.
"""

from __future__ import annotations

import asyncio
import json
import random
import resource
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from rlkit_tinker import Service
from rlkit_tinker.server.coordinator import Coordinator
from rlkit_tinker.server.executor import ServiceExecutor
from rlkit_tinker.server.folders import ModelFolders
from rlkit_tinker.server.journal import Journal
from rlkit_tinker.server.messages import CLASSES
from rlkit_tinker.server.requests import CREATE, PASS, SAMPLE, STEP, read_request
from rlkit_tinker.server.state import SamplerSource

TENANTS, RANK, STEPS, TOKENS = 64, 8, 10, 64


def pass_body(model: str, seq: int, rows: int) -> bytes:
    message, draw = (
        CLASSES["ForwardBackwardRequest"](model_id=model, seq_id=seq, loss_fn="cross_entropy"),
        random.Random(seq),
    )
    for _ in range(rows):
        tokens = [draw.randrange(3, 250) for _ in range(TOKENS + 1)]
        row = message.data.add()
        row.model_input.add().encoded_text.tokens = np.array(tokens[:-1], "<i4").tobytes()
        arrays = {"target_tokens": np.array(tokens[1:], "<i8"), "weights": np.ones(TOKENS, "<f4")}
        for name, array in arrays.items():
            row.loss_fn_inputs[name].dense = array.tobytes()
            row.loss_fn_inputs[name].dtype = 2 if name == "target_tokens" else 1
            row.loss_fn_inputs[name].shape.append(TOKENS)
    return message.SerializeToString()


async def ask(coordinator: Coordinator, tenant: str, route: str, raw: bytes) -> None:
    request = read_request(route, raw)
    await coordinator.submit(request, tenant)
    while await coordinator.retrieve(request.id, coordinator.session(request.owner, tenant), 60) is None:
        pass


async def train(coordinator: Coordinator, tenant: str, progress: Counter[str]) -> None:
    model = f"{tenant}:train:0"
    for seq in range(1, 10_000, 2):
        step = json.dumps({"model_id": model, "seq_id": seq + 1, "adam_params": {"learning_rate": 1e-4}}).encode()
        passed = ask(coordinator, tenant, PASS, pass_body(model, seq, rows=4))
        await asyncio.gather(passed, ask(coordinator, tenant, STEP, step))
        progress[tenant] += 1


async def flood(coordinator: Coordinator, tenant: str) -> None:
    """Keep passes and samples in flight."""
    model, sampler = f"{tenant}:train:0", f"{tenant}:sample:0"
    await coordinator.add_sampler(sampler, SamplerSource(), coordinator.session(tenant, tenant))
    params = {"max_tokens": 200, "stop": []}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]}
    fields = {"sampling_session_id": sampler, "prompt": prompt, "sampling_params": params, "num_samples": 32}

    async def passes(offset: int) -> None:
        for seq in range(1 + offset, 10_000, 16):
            await ask(coordinator, tenant, PASS, pass_body(model, seq, rows=64))

    async def samples(offset: int) -> None:
        for seq in range(offset, 10_000, 8):
            await ask(coordinator, tenant, SAMPLE, json.dumps({**fields, "seq_id": seq}).encode())

    await asyncio.gather(*map(passes, range(16)), *map(samples, range(8)))


async def measure(service: Service, folder: Path, with_flood: bool) -> None:
    service.folder = folder
    coordinator = Coordinator(Journal(folder), ServiceExecutor(service, ModelFolders(folder, "tiny", ["tiny"])), folder)
    running = asyncio.ensure_future(coordinator.run())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    tenants = [f"t{number}" for number in range(TENANTS)]
    for tenant in tenants:
        coordinator.open_session(tenant, tenant)
        body = {"session_id": tenant, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": RANK}}
        await ask(coordinator, tenant, CREATE, json.dumps(body).encode())
    progress = Counter(dict.fromkeys(tenants[1:], 0))
    tasks = [asyncio.ensure_future(train(coordinator, tenant, progress)) for tenant in tenants[1:]]
    if with_flood:
        tasks.append(asyncio.ensure_future(flood(coordinator, tenants[0])))
    start = asyncio.get_running_loop().time()
    while max(progress.values()) < STEPS:
        await asyncio.sleep(0.01)
    seconds, steps = asyncio.get_running_loop().time() - start, sorted(progress.values())
    state = sum(16 * p.numel() for adapter in service.bank._adapters for p in adapter.parameters)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{'with' if with_flood else 'without'} the flood: {steps[0]} to {steps[-1]} steps, {seconds / STEPS:.2f} s "
        f"each; adapters of {state >> 20} MiB, at the peak {(peak - before) >> 20} MiB more than before"
    )
    for task in (*tasks, running):
        task.cancel()
    await asyncio.gather(*tasks, running, return_exceptions=True)
    await coordinator.close()


def main() -> None:
    torch.set_num_threads(1)
    for with_flood in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(measure(Service("tiny", max_adapters=TENANTS), Path(folder), with_flood))


if __name__ == "__main__":
    main()
