"""What the engine costs as conversations grow: `python -m tests.bench.turns [TURNS ...]`.

32 conversations with a Qwen2 model of 1M parameters and random weights, float32, one thread: a prompt of 16 tokens, 4
to 12 sampled tokens a turn, and 8 tokens between two turns, as of a tool that replies at once. Printed are process CPU
seconds by sampled token, the tokens that ran as part of a prompt, and the memory at the peak, each number of turns in a
process of its own.
"""

from __future__ import annotations

import asyncio
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from rlkit.engines import TorchEngine
from rlkit.types import Request, SampleKey, Sampling
from tests.bench.generate import engine_of
from tests.bench.work import save_model

CONVERSATIONS, PROMPT, REPLY = 32, 16, 8
TURNS, ROUNDS = (1, 2, 4, 8, 16, 32), 3


async def converse(engine: TorchEngine, number: int, step: int, turns: int) -> int:
    """Hold one conversation; return how many tokens were sampled."""
    rng = random.Random(f"{step}/{number}")
    tokens = [rng.randrange(4, 500) for _ in range(PROMPT)]
    sampled = 0
    for turn in range(turns):
        sampling = Sampling(max_tokens=rng.randint(4, 12))
        key = SampleKey(0, step, str(number), 0)
        answer = await engine.generate(
            Request(tuple(tokens), sampling, key, session=str(number), continues=turn + 1 < turns)
        )
        sampled += len(answer.tokens)
        tokens += answer.tokens + [rng.randrange(4, 500) for _ in range(REPLY)]
    return sampled


def measure(turns: int) -> None:
    """Print the fastest of some rounds."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = AutoModelForCausalLM.from_pretrained(save_model(Path(folder), "1m"), dtype=torch.float32).eval()
    engine = engine_of(model, -1)

    async def all_of_them(step: int) -> int:
        return sum(await asyncio.gather(*(converse(engine, n, step, turns) for n in range(CONVERSATIONS))))

    costs = []
    for step in range(ROUNDS + 1):
        with engine.on_device():
            before = time.process_time()
            sampled = asyncio.run(all_of_them(step))
            costs.append((time.process_time() - before) / sampled)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    prefilled = engine.health().get("prefilled_tokens", float("nan")) / (ROUNDS + 1)
    print(f"{turns:>3} turns: {1e6 * min(costs[1:]):6.0f} us a token, {prefilled:8.0f} tokens prefilled, {peak:.0f} MB")


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        measure(int(sys.argv[2]))
        return
    for turns in map(int, sys.argv[1:] or TURNS):
        subprocess.run([sys.executable, "-m", "tests.bench.turns", "--measure", str(turns)], check=True)


if __name__ == "__main__":
    main()
