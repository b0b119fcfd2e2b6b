"""How TorchEngine compares with transformers' `generate`: `python tests/bench/rollout.py`.

16 prompts of 60 to 120 tokens, 8 samples each, answers of 8 to 128 tokens; a Qwen2 model of 10M parameters with random
weights, one thread. The two alternate in one process; figures are process CPU seconds, and medians of the ratio.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from rlkit.engines import TorchEngine
from rlkit.testing import random_model
from rlkit.types import Request, SampleKey, Sampling

ROUNDS = 5
SIZE = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 6,
    "num_key_value_heads": 2, "initializer_range": 0.02,
}  # fmt: skip


def requests(rng: random.Random) -> list[Request]:
    """Draw ragged prompts and answer lengths."""
    prompts = [tuple(rng.randrange(3, 250) for _ in range(rng.randint(60, 120))) for _ in range(16)]
    return [
        Request(p, Sampling(max_tokens=rng.randint(8, 128)), SampleKey(0, 0, str(i), s), session="")
        for i, p in enumerate(prompts)
        for s in range(8)
    ]


def ours(engine: TorchEngine, wanted: list[Request]) -> None:
    async def all_of_them() -> None:
        await asyncio.gather(*(engine.generate(r) for r in wanted))

    asyncio.run(all_of_them())


def theirs(model: Any, wanted: list[Request]) -> None:
    width = max(len(r.tokens) for r in wanted)
    tokens = torch.tensor([[0] * (width - len(r.tokens)) + list(r.tokens) for r in wanted])
    mask = torch.tensor([[0] * (width - len(r.tokens)) + [1] * len(r.tokens) for r in wanted])
    longest = max(r.sampling.max_tokens for r in wanted)
    model.generate(tokens, attention_mask=mask, max_new_tokens=longest, do_sample=True, top_k=0, eos_token_id=None)


def cpu_seconds(work: Any, *args: Any) -> float:
    start = time.process_time()
    work(*args)
    return time.process_time() - start


def main() -> None:
    torch.set_num_threads(1)
    model = random_model("qwen2", **SIZE)
    engine = TorchEngine()
    engine.bind(
        SimpleNamespace(
            policy=model,
            device=torch.device("cpu"),
            context=512,
            stop_ids=frozenset(),
            autocast=nullcontext,
            unsharded=nullcontext,
            tensor_parallel=1,
        )
    )
    rng = random.Random(0)
    rows = []
    for _ in range(ROUNDS):
        wanted = requests(rng)
        rows.append((cpu_seconds(theirs, model, wanted), cpu_seconds(ours, engine, wanted)))
        print(f"generate {rows[-1][0]:.2f} s   TorchEngine {rows[-1][1]:.2f} s", flush=True)
    print(f"generate / TorchEngine: median {statistics.median(a / b for a, b in rows):.2f}")


if __name__ == "__main__":
    main()
