"""The check that a server has the trainer's weights: both have the same log-probs of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlkit.engines.server.api import Answer
    from rlkit.interfaces.runtime import Runtime

TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b",
    "12 + 30 = 42, and 7 * 8 = 56",
    "In the beginning there was",
)
"""What is probed."""

CANARY_TOKENS = 16

Ask = Callable[[Sequence[Sequence[int]]], list[Tensor]]
"""The trainer's forward pass: rows of token ids in, the log-probs [T,V] f32 of each next token out."""


@dataclass(frozen=True)
class Tolerance:
    """How far log-probs may be apart, in nats: on average, and at most."""

    mean: float
    most: float


TOLERANCES = {
    torch.float32: Tolerance(1e-3, 1e-2),
    torch.bfloat16: Tolerance(0.1, 1.0),
    torch.float16: Tolerance(0.05, 0.5),
}
"""By the engine's type. Seen on a CPU: 1e-5 at most in float32, 0.03 in bfloat16."""


@dataclass(frozen=True)
class Expected:
    """What the trainer computes: each row's tokens, and its log-probs [T,V] f32 of the token that follows each."""

    rows: list[list[int]]
    logps: list[Tensor]


@dataclass(frozen=True)
class Gap:
    """How far apart engine and trainer are; infinitely where one of them has NaN."""

    mean: float
    most: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether both metrics are small enough."""
        return self.mean <= tolerance.mean and self.most <= tolerance.most


def probe_rows(tokenizer: Any, context: int) -> list[list[int]]:
    """Return the token ids of the probes."""
    rows = [list(tokenizer.encode(text, add_special_tokens=False)) for text in TEXTS]
    return [row[: max(2, min(24, context - 1 - CANARY_TOKENS))] for row in rows]


@torch.no_grad()
def ask_policy(runtime: Runtime, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return each row's log-probs under the trainer's policy, in its own precision.

    All ranks must call this, those of one tensor-parallel group with the same rows. No rank holds the whole of a
    sharded policy meanwhile.
    """
    policy, width = runtime.policy, max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=runtime.device)
    training = policy.training
    policy.eval()
    try:
        logits = runtime.logits(tokens)
    finally:
        policy.train(training)
    return [torch.log_softmax(one[: len(row)].float(), -1).cpu() for one, row in zip(logits, rows, strict=True)]


def gap_between(expected: Sequence[Tensor], answers: Sequence[Answer], count: int) -> Gap:
    """Compare servers' log-probs with the trainer's [T,V] of the same tokens.

    Of the last `count` tokens of each answer, which its server chose greedily, how much less likely than the likeliest
    one the trainer finds them counts too.
    """
    differences = []
    for logps, answer in zip(expected, answers, strict=True):
        of_tokens = logps[torch.arange(len(answer.tokens)), torch.tensor(answer.tokens)]
        less = logps[: len(answer.tokens)].amax(-1) - of_tokens
        less[: len(less) - count] = 0
        differences.append(torch.maximum((of_tokens - torch.tensor(answer.logps)).abs(), less))
    found = torch.cat(differences).nan_to_num(nan=torch.inf)
    return Gap(float(found.mean()), float(found.max()))
