"""What a decode step on a GPU compiles, where each kernel counts: it is recorded once, and replayed for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.ops.fusion import Fused

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig

MIN_HIDDEN = 512
"""The least hidden size of models whose steps are worth the seconds of a compilation."""

MIN_ROWS = 8
"""The least rows: for fewer ones torch compiles functions again, since it takes sizes of 1 for constants."""


def compiles(config: ModelConfig, rows: int, device: torch.device) -> bool:
    """Whether all functions of a pass over so many tokens or rows are compiled, not those of large tensors alone."""
    return device.type == "cuda" and rows >= MIN_ROWS and config.hidden_size >= MIN_HIDDEN


@Fused
def rotated_heads(
    heads: Tensor, rotations: Tensor, scales: Tensor | None, counts: tuple[int, int], eps: float
) -> tuple[Tensor, Tensor]:
    """Return queries [N,Q,D], and keys and values [N,2,K,D], of all heads [N,Q+2K,D], in their dtype.

    Args:
        heads: In queries and keys, channels that are rotated together are neighbours.
        rotations: [N,1,D/2,2] f32, cosines and sines.
        scales: [Q+K,D], of norms of queries and keys; None without.
        counts: (Q, K).
        eps: Of the norms.
    """
    queries, keys = counts
    rotated = heads[:, : queries + keys].float()
    if scales is not None:
        rotated = rotated * (rotated.square().mean(-1, keepdim=True) + eps).rsqrt() * scales
    even, odd = rotated.reshape(*rotated.shape[:-1], -1, 2).unbind(-1)
    cos, sin = rotations.unbind(-1)
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(heads.dtype)
    return turned[:, :queries].contiguous(), torch.stack((turned[:, queries:], heads[:, queries + keys :]), 1)
