"""The trainer's log-probs of completions that were sampled among candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlkit.models.actor import Actor
from rlkit.types import Completion, Reads, Request


def logps_over_candidates(policy: Any, asked: Request, answer: Completion) -> Tensor:
    """Return the log-prob of each sampled token, renormalised over its candidates."""
    tokens = torch.tensor([[*asked.tokens, *answer.tokens]])
    mask = torch.arange(tokens.shape[1])[None] >= len(asked.tokens)
    candidates = torch.full((*tokens.shape, asked.sampling.top_k), -1, dtype=torch.int32)
    for column, ids in enumerate(answer.candidates, len(asked.tokens)):
        candidates[0, column, : len(ids)] = torch.tensor(ids)
    logps: Tensor = Actor(policy)(tokens, mask, asked.sampling.temperature, Reads(candidates=candidates)).logps
    return logps[mask]
