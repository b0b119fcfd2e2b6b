"""What servers that have the recipe's teacher compute of a batch."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from math import nan
from typing import TypeVar

import torch
from torch import Tensor

from rlkit.engines import connect_teacher
from rlkit.interfaces.teacher import ServedTeacher, TokenSpan
from rlkit.ops.logps import MIN_PROB
from rlkit.train.logps import columns_of
from rlkit.train.setup import TrainContext
from rlkit.types import RolloutBatch

T = TypeVar("T")


def logps_on_servers(context: TrainContext, batch: RolloutBatch) -> Tensor:
    """Return the teacher's log-probs [B,T] f32, 0 outside the mask."""
    rows, spans = _spans(batch)
    found = torch.zeros(batch.mask.shape)
    answers = _answers(context, lambda teacher: teacher.logps(spans))
    for row, span, logps in zip(rows, spans, answers, strict=True):
        found[row, span.start : span.start + len(logps)] = torch.tensor(logps)
    return found.to(batch.mask.device) * batch.mask


def top_on_servers(context: TrainContext, batch: RolloutBatch, count: int) -> list[Tensor]:
    """Return the most likely tokens [B,T,K] i64 and their log-probs [B,T,K+1] f32, 0 outside the mask.

    Log-probs are NaN where the policy has no such token. The last is what the others leave of 1.
    """
    rows, spans = _spans(batch)
    ids = torch.zeros(*batch.mask.shape, count, dtype=torch.long)
    logps = torch.zeros(*batch.mask.shape, count + 1)
    answers = _answers(context, lambda teacher: teacher.top_logps(spans, count))
    for row, span, places in zip(rows, spans, answers, strict=True):
        of = slice(span.start, span.start + len(places))
        ids[row, of] = torch.tensor([tokens for tokens, _ in places])
        logps[row, of, :-1] = torch.tensor([found for _, found in places])
    logps[..., -1] = (1 - logps[..., :-1].exp().sum(-1)).clamp(min=MIN_PROB).log()
    unknown = (ids >= columns_of(context.models.actor)).any(-1, keepdim=True)
    ids, logps = ids.masked_fill(unknown, 0), logps.masked_fill(unknown, nan)
    device, mask = batch.mask.device, batch.mask[..., None]
    return [ids.to(device) * mask, torch.where(mask, logps.to(device), 0.0)]


def _answers(context: TrainContext, ask: Callable[[ServedTeacher], Coroutine[object, None, list[T]]]) -> list[T]:
    """Ask the teacher's servers, once for the ranks of a tensor-parallel group."""
    section, ranks = context.recipe.teacher, context.ranks
    assert section is not None
    assert section.urls is not None
    return ranks.broadcast_tp(context.rollouts.wait(ask(connect_teacher(section.urls))) if ranks.lead else [])


def _spans(batch: RolloutBatch) -> tuple[list[int], list[TokenSpan]]:
    """Return the rows that have tokens under the mask, and what is scored of each: from the first of these on."""
    mask, tokens = batch.mask.cpu(), batch.tokens.tolist()
    rows = mask.any(-1).nonzero().flatten().tolist()
    starts, lengths = mask.int().argmax(-1).tolist() if rows else [], batch.attention.sum(-1).tolist()
    return rows, [TokenSpan(tokens[row][: lengths[row]], starts[row]) for row in rows]
