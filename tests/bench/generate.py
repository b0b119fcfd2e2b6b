"""How TorchEngine compares with transformers' `generate`: `python -m tests.bench.generate [SIZE/LENGTH ...]`.

16 prompts of about 100 tokens, 8 samples each, Qwen2 models with random weights whose answers end with a probability of
1/80 at each token; float32, one thread. The two alternate in one process; metrics are process CPU seconds by sampled
token, whose number `generate` counts up to each row's end, and the ratio is the median of rounds. Greedy answers to one
sample of each prompt are held to `generate`'s, token for token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rlkit.engines import TorchEngine
from rlkit.types import Request, SampleKey, Sampling
from tests.bench.work import SIZES, save_model

ROWS = ("1m/256", "10m/64", "10m/256")


def requests(seed: int, length: int, end: int, temperature: float = 1.0, samples: int = 8) -> list[Request]:
    """Draw prompts; each is asked for several samples."""
    rng = random.Random(seed)
    prompts = [tuple(rng.randrange(end + 1, 500) for _ in range(rng.randint(85, 115))) for _ in range(16)]
    sampling = Sampling(max_tokens=length, temperature=temperature)
    keys = [(i, s) for i in range(len(prompts)) for s in range(samples)]
    return [Request(prompts[i], sampling, SampleKey(0, seed, str(i), s), session="") for i, s in keys]


def engine_of(model: Any, end: int) -> TorchEngine:
    """Return an engine on a model."""
    engine = TorchEngine()
    engine.bind(
        SimpleNamespace(  # type: ignore[arg-type]
            policy=model,
            device=torch.device("cpu"),
            context=2048,
            stop_ids=frozenset({end}),
            autocast=nullcontext,
            unsharded=nullcontext,
            tensor_parallel=1,
        )
    )
    return engine


def ours(engine: TorchEngine, wanted: list[Request]) -> list[list[int]]:
    """Answer with TorchEngine, its copies of the weights made included."""

    async def all_of_them() -> list[list[int]]:
        return [answer.tokens for answer in await asyncio.gather(*(engine.generate(r) for r in wanted))]

    with engine.on_device():
        return asyncio.run(all_of_them())


def theirs(model: Any, wanted: list[Request], end: int) -> list[list[int]]:
    """Answer with `generate`, padded on the left."""
    width = max(len(r.tokens) for r in wanted)
    tokens = torch.tensor([[end] * (width - len(r.tokens)) + list(r.tokens) for r in wanted])
    mask = torch.tensor([[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in wanted])
    sampling = wanted[0].sampling
    how = {"do_sample": True, "top_k": 0} if sampling.temperature else {"do_sample": False}
    found = model.generate(tokens, attention_mask=mask, max_new_tokens=sampling.max_tokens, pad_token_id=end, **how)
    answers = found[:, width:].tolist()
    return [a[: a.index(end) + 1] if end in a else a for a in answers]


def cost(answer: Callable[[], list[list[int]]]) -> float:
    """Return the CPU milliseconds by sampled token."""
    start = time.process_time()
    tokens = sum(map(len, answer()))
    return (time.process_time() - start) / tokens * 1e3


def compare(model: Any, name: str, length: int, rounds: int) -> None:
    """Print a line of the table; the first round is left out."""
    end = int(model.config.eos_token_id)
    engine = engine_of(model, end)
    greedy = requests(0, min(length, 64), end, temperature=0.0, samples=1)
    same = sum(a == b for a, b in zip(ours(engine, greedy), theirs(model, greedy, end), strict=True))
    found = []
    for seed in range(rounds + 1):
        wanted = requests(seed, length, end)
        found.append((cost(lambda w=wanted: theirs(model, w, end)), cost(lambda w=wanted: ours(engine, w))))  # type: ignore[misc]
    engine.close()
    old, new = (statistics.median(column) for column in zip(*found[1:], strict=True))
    ratio = statistics.median(a / b for a, b in found[1:])
    print(
        f"{name:9} generate {old:.3f} ms a token | TorchEngine {new:.3f} | ratio {ratio:.2f} | "
        f"{same} of {len(greedy)} greedy answers equal",
        flush=True,
    )


def main() -> None:
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(ROWS), metavar="SIZE/LENGTH", help=f"sizes: {', '.join(SIZES)}")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in given.rows:
            size, _, length = name.partition("/")
            where = Path(folder) / size
            if not where.exists():
                save_model(where, size)
            model = AutoModelForCausalLM.from_pretrained(where, dtype=torch.float32).eval()
            compare(model, name, int(length), given.rounds)


if __name__ == "__main__":
    main()
