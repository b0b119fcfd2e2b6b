"""The check that a server has the trainer's weights: both compute the same log-probs of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rlkit.interfaces.model import Tokenizer
    from rlkit.interfaces.runtime import Runtime
    from rlkit_servers.api import ServerOutput

PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "def add(a, b):\n    return a + b",
    "12 + 30 = 42, and 7 * 8 = 56",
    "In the beginning there was",
)

CANARY_TOKENS = 16
"""Tokens that servers sample greedily after the first sync."""

PolicyLogps = Callable[[Sequence[Sequence[int]]], list[Tensor]]
"""The trainer's forward pass: from rows of token ids to the log-probs [T,V] f32 of each next token."""


@dataclass(frozen=True)
class Tolerance:
    """The largest accepted difference of log-probs, in nats: on average, and of any token."""

    mean: float
    max: float


TOLERANCES = {
    torch.float32: Tolerance(1e-3, 1e-2),
    torch.bfloat16: Tolerance(0.1, 1.0),
    torch.float16: Tolerance(0.05, 0.5),
}
"""Tolerances by the engine's dtype. Measured on a CPU: at most 1e-5 in float32, 0.03 in bfloat16."""


@dataclass(frozen=True)
class ExpectedLogps:
    """The trainer's log-probs: each row's tokens, and for each of them the log-probs [T,V] f32 of the next token."""

    rows: list[list[int]]
    logps: list[Tensor]


@dataclass(frozen=True)
class LogpGap:
    """The difference between a server's log-probs and the trainer's; infinite if either has NaN."""

    mean: float
    max: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether both the mean and the largest difference are small enough."""
        return self.mean <= tolerance.mean and self.max <= tolerance.max


def probe_rows(tokenizer: Tokenizer, context: int) -> list[list[int]]:
    """Return the token ids of the texts that are probed."""
    rows = [list(tokenizer.encode(text, add_special_tokens=False)) for text in PROBE_TEXTS]
    return [row[: max(2, min(24, context - 1 - CANARY_TOKENS))] for row in rows]


@torch.no_grad()
def policy_logps(runtime: Runtime, rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return each row's log-probs under the trainer's policy, in the precision in which it is trained.

    All ranks must call this, those of one tensor-parallel group with the same rows. A sharded policy stays sharded.
    """
    policy, width = runtime.policy, max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=runtime.device)
    training = policy.training
    policy.eval()
    try:
        logits_BTV = runtime.logits(tokens)
    finally:
        policy.train(training)
    return [
        torch.log_softmax(logits[: len(row)].float(), -1).cpu() for logits, row in zip(logits_BTV, rows, strict=True)
    ]


def gap_between(expected: Sequence[Tensor], outputs: Sequence[ServerOutput], greedy: int) -> LogpGap:
    """Compare servers' log-probs with the trainer's [T,V] of the same tokens.

    The last `greedy` tokens of each output were chosen greedily by its server. For those, the trainer's shortfall
    against its own most likely token counts as a difference too.
    """
    differences = []
    for logps, output in zip(expected, outputs, strict=True):
        token_logps = logps[torch.arange(len(output.tokens)), torch.tensor(output.tokens)]
        shortfall = logps[: len(output.tokens)].amax(-1) - token_logps
        shortfall[: len(shortfall) - greedy] = 0
        differences.append(torch.maximum((token_logps - torch.tensor(output.logps)).abs(), shortfall))
    gaps = torch.cat(differences).nan_to_num(nan=torch.inf)
    return LogpGap(float(gaps.mean()), float(gaps.max()))
