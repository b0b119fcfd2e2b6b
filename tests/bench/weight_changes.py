"""Full and changed weights on their way to a server: `python -m tests.bench.weight_changes`.

A random Qwen2 is trained in float32 with Adam on random tokens and served in bfloat16, as in `bf16-mixed`. After each
step its weights go to a receiver twice, through files of shared memory: whole, and as changes with full weights where
these are dense. Printed are means over all syncs but the first: the share of elements that differ, bytes, and CPU
seconds (one thread) of the trainer's side and of the server's. Both copies of the weights are compared bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rlkit_servers.api import ServerApi
from rlkit_servers.changes import WeightReceiver
from rlkit_servers.transports import FileTransport
from safetensors import safe_open
from torch import Tensor, nn

from rlkit.testing import random_model

SIZES = {
    "10M": {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6, "vocab_size": 8192},
    "100M": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 10, "vocab_size": 8192},
}
OTHERS = {"num_attention_heads": 8, "num_key_value_heads": 8, "initializer_range": 0.02}
LEARNING_RATES = (1e-6, 1e-5, 1e-3)


class Files(FileTransport):
    """Files without a server that they are sent to."""

    async def load(self, api: ServerApi, parcel: Path) -> None: ...


class Way:
    """A transport, and a server's weights at its end."""

    def __init__(self, model: nn.Module, changes: bool) -> None:
        self.transport = Files(changes)
        self.own = {name: torch.empty_like(x, dtype=torch.bfloat16) for name, x in model.named_parameters()}
        self.receiver = WeightReceiver(self.own)
        self.costs: list[tuple[float, float, float, float]] = []
        """Changed share, bytes, and CPU seconds of trainer and server, for each sync."""

    def push(self, weights: list[tuple[str, Tensor]], number: int) -> None:
        """Send weights."""
        sent = self.transport.sent
        start = time.process_time()
        if sent is not None:
            sent.begin(str(number), sent.label == self.receiver.version)
        file = self.transport.prepare(weights)
        if sent is not None:
            sent.end()
        middle = time.process_time()
        self.receiver.begin()
        with safe_open(file, framework="pt") as tensors:
            named = {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
            self.receiver.load(named, tensors.metadata() or {})
        self.receiver.finish(str(number))
        end = time.process_time()
        size = file.stat().st_size
        self.transport.end()
        share = 1.0 if sent is None else sent.changed_share
        self.costs.append((share, float(size), middle - start, end - middle))


def trained(size: str, lr: float, seed: int = 0) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model, and a function that makes one step."""
    model = random_model("qwen2", seed=seed, **SIZES[size], **OTHERS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)

    def step() -> None:
        tokens = torch.randint(SIZES[size]["vocab_size"], (2, 64), generator=generator)
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def measure(size: str, lr: float, steps: int) -> None:
    """Print the rows of a model and a learning rate."""
    model, step = trained(size, lr)
    ways = {"full": Way(model, changes=False), "changes": Way(model, changes=True)}
    for number in range(steps + 1):
        weights = [(name, x.detach().bfloat16()) for name, x in model.named_parameters()]
        for way in ways.values():
            way.push(weights, number)
        for name, sent in weights:
            assert all(torch.equal(way.own[name], sent) for way in ways.values()), name
        step()
    for name, way in ways.items():
        share, size_, trainer, server = (statistics.mean(column) for column in zip(*way.costs[1:], strict=True))
        compared = f"{share:.2%}" if name == "changes" else ""
        row = (size, f"{lr:.0e}", name, compared, f"{size_ / 1e6:.2f}", f"{trainer:.3f}", f"{server:.3f}")
        print("|", " | ".join(row), "|", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sizes", nargs="*", default=list(SIZES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| model | lr | sent | elements that differ | MB a sync | trainer, s | server, s |")
    print("|---" * 7 + "|")
    for size in options.sizes:
        for lr in LEARNING_RATES:
            measure(size, lr, options.steps)


if __name__ == "__main__":
    main()
