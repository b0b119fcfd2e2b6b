"""Rows of a batch on their way to a pool: divided among its ranks, and joined there with those of other ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkit.types import Batch, RolloutBatch

FIELDS = {
    "values": ("tokens", "attention", "mask", "group"),
    "logps": ("tokens", "attention", "mask", "group", "candidates"),
    "top": ("tokens", "attention", "mask", "group"),
    "update": ("tokens", "attention", "mask", "group", "values", "returns"),
}
"""The fields of a batch that each work of a pool reads."""
PADDING = {"candidates": -1}


def divided(batch: RolloutBatch, work: str, count: int) -> list[dict[str, Tensor]]:
    """Return the fields of a batch that a work reads, its rows in `count` consecutive parts, some of them empty."""
    return split_rows({name: x for name, x in batch.tensors().items() if name in FIELDS[work]}, count)


def split_rows(fields: Mapping[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Return the rows of all tensors in `count` consecutive parts, some of them empty, that share no memory."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in fields.items():
        for part, rows in zip(parts, tensor.tensor_split(count), strict=True):
            part[name] = rows.clone()
    return parts


def joined(parts: Sequence[Mapping[str, Tensor]], device: torch.device) -> Batch:
    """Return the rows of all parts as a batch, padded to the longest; what no work reads is 0."""
    fields: dict[str, Any] = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        sizes = [max(extents) for extents in zip(*(t.shape[1:] for t in tensors), strict=True)]
        wide = [pad(t, _margins(t, sizes), value=PADDING.get(name, 0)) for t in tensors]
        fields[name] = torch.cat(wide).to(device)
    tokens = fields["tokens"]
    zeros = torch.zeros(tokens.shape, device=device)
    unread: dict[str, Any] = {"rollout_logps": zeros, "versions": torch.zeros_like(tokens), "token_rewards": zeros}
    unread |= {"rewards": zeros.sum(-1), "components": zeros[:, :0], "advantages": zeros}
    return Batch(**unread, **fields)


def separated(tensors: Mapping[str, Tensor], parts: Sequence[Mapping[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Divide tensors [B,T,...] of joined rows into those of each part, [b,t,...]."""
    separate: list[dict[str, Tensor]] = [{} for _ in parts]
    counts = [len(part["tokens"]) for part in parts]
    for name, tensor in tensors.items():
        for own, part, rows in zip(separate, parts, torch.split(tensor, counts), strict=True):
            own[name] = rows[:, : part["tokens"].shape[1]].clone()
    return separate


def _margins(tensor: Tensor, sizes: Sequence[int]) -> list[int]:
    """Return the paddings that `pad` takes, from the last dimension to the second, to reach these sizes."""
    return [x for size, own in zip(reversed(sizes), reversed(tensor.shape[1:]), strict=True) for x in (0, size - own)]
