"""Log-probs of tokens over a large vocabulary, forward and backward: `python -m tests.bench.logps`.

V=151,936, H=896 and N tokens in float32, one thread: `log_softmax` of all logits, `token_logps` where the logits fit
its bound and are kept, and where they are computed again. They alternate; CPU seconds, and memory over the weight's
gradient.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from rlkit.ops.logps import OutputLayer, token_logps
from rlkit.types import Reads
from tests.bench.step import peak, reset_peak

VOCABULARY, HIDDEN = 151_936, 896


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return torch.log_softmax(linear(hidden, weight), -1).gather(-1, targets[:, None])


def ours(hidden: Tensor, weight: Tensor, targets: Tensor, memory: int) -> Tensor:
    return token_logps(hidden, OutputLayer(weight), targets, reads=Reads(), memory=memory).logps


def measure(work: Callable[..., Tensor], hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[float, float]:
    """Return CPU seconds, and MB over what was there and the weight's gradient."""
    hidden.grad = weight.grad = None
    base = reset_peak()
    start = time.process_time()
    work(hidden, weight, targets).sum().backward()
    return time.process_time() - start, peak() - base - weight.nbytes / 2**20


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    hidden = torch.randn(given.tokens, HIDDEN).requires_grad_()
    weight = (torch.randn(VOCABULARY, HIDDEN) * 0.03).requires_grad_()
    targets = torch.randint(VOCABULARY, (given.tokens,))
    sides = {
        "log_softmax": plain,
        "kept": partial(ours, memory=4 * VOCABULARY * given.tokens),
        "computed again": partial(ours, memory=256 * 2**20),
    }
    rounds = [
        {name: measure(work, hidden, weight, targets) for name, work in sides.items()} for _ in range(given.rounds)
    ]
    for name in sides:
        ratio = statistics.median(r[name][0] / r["log_softmax"][0] for r in rounds)
        seconds, memory = (statistics.median(r[name][i] for r in rounds) for i in (0, 1))
        print(f"{name:15} {seconds:6.2f} s, {ratio:.2f} times log_softmax, {memory:.0f} MB over the weight's gradient")


if __name__ == "__main__":
    main()
