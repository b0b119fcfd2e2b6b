"""The door from ragged Python objects to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlkit.types import Batch, Trajectory


def collate(trajectories: Sequence[Trajectory]) -> Batch:
    """Make a right-padded batch, on the CPU, of trajectories that were scored and have tokens of the policy.

    The reward sits on the last token that the policy chose; a turn's reward on the last token of that turn.

    Raises:
        ValueError: A trajectory has no reward, or no token of the policy.
    """
    width = max((len(t.tokens) for t in trajectories), default=0)
    names = tuple(sorted({name for t in trajectories if t.score for name in t.score.parts}))
    token_rewards = [_token_rewards(t, width) for t in trajectories]

    def padded(rows: list[list[Any]], fill: Any, dtype: torch.dtype) -> torch.Tensor:
        full = [row + [fill] * (width - len(row)) for row in rows]
        return torch.tensor(full, dtype=dtype).reshape(len(rows), width)

    rewards = padded(token_rewards, 0.0, torch.float32)
    parts = [[t.score.parts.get(name, 0.0) for name in names] for t in trajectories if t.score]
    return Batch(
        tokens=padded([t.tokens for t in trajectories], 0, torch.long),
        attention=padded([[True] * len(t.tokens) for t in trajectories], False, torch.bool),
        mask=padded([t.mask for t in trajectories], False, torch.bool),
        rollout_logps=padded([t.logps for t in trajectories], 0.0, torch.float32),
        group=torch.tensor([t.group for t in trajectories], dtype=torch.long),
        versions=padded([t.versions for t in trajectories], -1, torch.long),
        token_rewards=rewards,
        rewards=rewards.sum(-1),
        parts=torch.tensor(parts, dtype=torch.float32).reshape(len(trajectories), len(names)),
        part_names=names,
    )


def _token_rewards(trajectory: Trajectory, width: int) -> list[float]:
    score = trajectory.score
    chosen = [i for i, mine in enumerate(trajectory.mask) if mine]
    if score is None or score.reward is None or not chosen:
        raise ValueError(f"trajectory of prompt {trajectory.prompt.id!r} has no reward, or no token of the policy")
    row = [0.0] * width
    row[chosen[-1]] += score.reward
    if score.turn_rewards is not None:
        ends = [turn.end - 1 for turn in trajectory.turns if turn.role == "assistant"]
        for end, reward in zip(ends, score.turn_rewards, strict=True):
            row[end] += reward
    return row
