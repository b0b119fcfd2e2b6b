"""The memory and the time of an update of one long row, by the number of ranks that share its tokens.

usage: python tests/bench/sequence_parallel.py [TOKENS] [RANKS ...]   (8192 tokens on 1, 2 and 4 ranks by default)

Each setting has processes of its own on this machine's CPU (gloo). Memory is the resident memory of a rank at the peak
of a forward and a backward pass, over what it held before. Ranks share the cores, so that more of them are not faster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory

MODEL = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 65536, "initializer_range": 0.02,
}  # fmt: skip


class Peak(threading.Thread):
    """Samples the resident memory of this process until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = 0.0
        self.stopped = threading.Event()

    def run(self) -> None:
        from rlkit.run.preflight.memory import rss_mb

        while not self.stopped.wait(0.005):
            self.mib = max(self.mib, rss_mb())


def measure(tokens: int, ranks: int, recompute: bool) -> None:
    """Print the memory of all ranks at the peak over before, in MiB, and the seconds, as JSON on the first rank."""
    import torch
    from rlkit_authors.models import random_model

    from rlkit import recipe as sections
    from rlkit.base.garbage import reuse_memory
    from rlkit.distributed.fsdp2 import make_fabric
    from rlkit.distributed.ranks import Ranks
    from rlkit.models.actor import Actor
    from rlkit.recipe import Train
    from rlkit.run.preflight.memory import rss_mb
    from rlkit.train.models import Placer

    strategy = sections.FSDP2(sequence_parallel=ranks)
    fabric = make_fabric(sections.Fabric("cpu", ranks, strategy=strategy))
    fabric.launch()
    reuse_memory()
    train = Train(steps=1, checkpoint_activations=recompute)
    placer = Placer(fabric, Ranks(fabric))
    policy = placer.trainable(Actor(random_model("qwen2", **MODEL)), train, train)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(3, MODEL["vocab_size"], (1, tokens), generator=generator)
    mask = torch.ones_like(row, dtype=torch.bool)
    for length in (256, tokens):  # the first pass allocates what stays
        before, peak, start = rss_mb(), Peak(), time.perf_counter()
        peak.start()
        loss = -policy.module(row[:, :length], mask[:, :length]).logps.mean()
        policy.backward(loss)
        seconds = time.perf_counter() - start
        peak.stopped.set()
        peak.join()
        norm = float(policy.clip_gradients())
        policy.optimizer.zero_grad()
    found = placer.ranks.gather_world((peak.mib - before, seconds))
    if fabric.is_global_zero:
        result = {"mib": [mib for mib, _ in found], "seconds": max(s for _, s in found), "norm": norm}
        Path(os.environ["RESULT"]).write_text(json.dumps(result), encoding="utf-8")


def start(tokens: int, ranks: int, recompute: bool) -> dict[str, object]:
    """Measure one setting in processes of its own."""
    with TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}")
        env = {**os.environ, "RESULT": str(result), "OMP_NUM_THREADS": "1"}
        arguments = ("--rank", str(tokens), str(ranks), str(int(recompute)))
        subprocess.run((sys.executable, *launcher, __file__, *arguments), env=env, check=True, capture_output=True)
        measured: dict[str, object] = json.loads(result.read_text(encoding="utf-8"))
        return measured


def main(tokens: int, numbers: list[int]) -> None:
    """Print a table."""
    print(f"| a row of {tokens} tokens | ranks | MiB per rank (all ranks) | of undivided | seconds | gradient norm |")
    print("|---|---|---|---|---|---|")
    for recompute in (False, True):
        undivided = 0.0
        for ranks in numbers:
            measured = start(tokens, ranks, recompute)
            mib: list[float] = measured["mib"]  # type: ignore[assignment]
            undivided = undivided or max(mib)
            listed = ", ".join(f"{x:,.0f}" for x in mib)
            share = f"{max(mib) / undivided:.2f}"
            kind = "recomputed activations" if recompute else "kept activations"
            print(
                f"| {kind} | {ranks} | {max(mib):,.0f} ({listed}) | {share} | {measured['seconds']:.1f} | "
                f"{measured['norm']:.6f} |",
                flush=True,
            )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        measure(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "1")
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 8192, [int(n) for n in sys.argv[2:]] or [1, 2, 4])
