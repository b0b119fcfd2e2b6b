"""The proof that a server has the trainer's weights: both give the same log-probs of the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
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
"""Asks the trainer: rows of token ids in, each row's log-probs [T,V] f32 out, of the token that follows each."""


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
    """What the trainer says: each row's tokens, and its log-probs [T,V] f32 of the token that follows each."""

    rows: list[list[int]]
    logps: list[Tensor]


@dataclass(frozen=True)
class Gap:
    """How far apart engine and trainer are; infinitely where one of them gives NaN."""

    mean: float
    most: float

    def within(self, tolerance: Tolerance) -> bool:
        """Whether both figures are small enough."""
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


def probe_body(rows: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Return the request that has a server score the probes and add the likeliest token to each."""
    sampling = {"temperature": 0.0, "max_new_tokens": 1, "ignore_eos": True}
    return {"input_ids": list(rows), "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}


def canary_body(row: Sequence[int]) -> dict[str, Any]:
    """Return the request for a greedy answer to a probe."""
    sampling = {"temperature": 0.0, "max_new_tokens": CANARY_TOKENS, "ignore_eos": True}
    return {"input_ids": list(row), "sampling_params": sampling, "return_logprob": True}


def probe_gap(expected: Expected, answers: Sequence[dict[str, Any]]) -> Gap:
    """Compare a server's log-probs with the trainer's, of the probes' tokens and of the one that it added to each."""
    differences = []
    for row, logps, answer in zip(expected.rows, expected.logps, answers, strict=True):
        meta = answer["meta_info"]
        scored = [*meta["input_token_logprobs"][1:], *meta["output_token_logprobs"]]
        tokens = [*row[1:], *answer["output_ids"]]
        found = torch.tensor([float("nan") if s[0] is None else s[0] for s in scored])
        differences.append((logps[torch.arange(len(tokens)), torch.tensor(tokens)] - found).abs())
    return _gap(torch.cat(differences))


def canary_gap(expected: Tensor, answer: dict[str, Any]) -> Gap:
    """Compare a greedy answer with the trainer's log-probs [T,V] of it, and with the tokens that it finds likeliest."""
    tokens = torch.tensor(answer["output_ids"])
    found = torch.tensor([s[0] for s in answer["meta_info"]["output_token_logprobs"]])
    of_tokens = expected[torch.arange(len(tokens)), tokens]
    return _gap(torch.maximum((of_tokens - found).abs(), expected.amax(-1) - of_tokens))


def _gap(differences: Tensor) -> Gap:
    differences = differences.nan_to_num(nan=torch.inf)
    return Gap(float(differences.mean()), float(differences.max()))
