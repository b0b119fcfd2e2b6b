"""What token-budget micro-batches and the chunked output layer save: `python tests/bench/learning.py`.

One forward and backward pass over 32 rows of 70 to 250 tokens, about half of them the policy's; a Qwen2 model with
random weights, 10M parameters besides its vocabulary of 32,000, one thread. A: one micro-batch padded to the longest
row, full logits, as a plain trainer does it. B: the actor's chunked log-probs over micro-batches of 4,096 tokens,
rows of similar length together. The two alternate in one process.
"""

from __future__ import annotations

import random
import resource
import statistics
import sys
import time

import torch

from rlkit.models.actor import Actor
from rlkit.ops.batching import micro_batches
from rlkit.testing import random_model

ROUNDS = 3
SIZE = {
    "vocab_size": 32_000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 2, "initializer_range": 0.02,
}  # fmt: skip


def plain(actor: Actor, rows: list[list[int]]) -> None:
    width = max(map(len, rows))
    tokens = torch.tensor([r + [0] * (width - len(r)) for r in rows])
    mask = torch.tensor(
        [[False] * (len(r) // 2) + [True] * (len(r) - len(r) // 2) + [False] * (width - len(r)) for r in rows]
    )
    logits = actor.policy(input_ids=tokens, use_cache=False).logits[:, :-1]
    logps = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    (logps * mask[:, 1:]).sum().backward()


def budgeted(actor: Actor, rows: list[list[int]]) -> None:
    for part in micro_batches([len(r) for r in rows], 4096):
        chosen = [rows[i] for i in part]
        width = max(map(len, chosen))
        tokens = torch.tensor([r + [0] * (width - len(r)) for r in chosen])
        lengths = torch.tensor([len(r) for r in chosen])[:, None]
        columns = torch.arange(width)
        actor(tokens, (columns >= lengths // 2) & (columns < lengths)).logps.sum().backward()


def measure(which: str) -> None:
    """Print CPU seconds of one pass and the peak memory beyond the model, in a process of its own."""
    torch.set_num_threads(1)
    actor = Actor(random_model("qwen2", **SIZE))
    rng = random.Random(0)
    rows = [[rng.randrange(3, 30_000) for _ in range(rng.randint(70, 250))] for _ in range(32)]
    base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.process_time()
    {"plain": plain, "budgeted": budgeted}[which](actor, rows)
    print(time.process_time() - start, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - base) / 1024)


def main() -> None:
    import subprocess

    rows = []
    for _ in range(ROUNDS):
        for which in ("plain", "budgeted"):
            done = subprocess.run((sys.executable, __file__, which), capture_output=True, text=True, check=True)
            seconds, megabytes = map(float, done.stdout.split())
            rows.append((which, seconds, megabytes))
            print(f"{which:<9} {seconds:6.2f} s  {megabytes:6.0f} MB over the model", flush=True)
    time_of, memory_of = (
        {w: statistics.median(r[i] for r in rows if r[0] == w) for w in ("plain", "budgeted")} for i in (1, 2)
    )
    print(
        f"plain / budgeted: time {time_of['plain'] / time_of['budgeted']:.2f}, "
        f"memory {memory_of['plain'] / memory_of['budgeted']:.1f}"
    )


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
