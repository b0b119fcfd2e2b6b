"""The door from ragged Python objects to tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from rlkit.types import Batch, RolloutBatch, Trajectory


def collate(trajectories: Sequence[Trajectory]) -> RolloutBatch:
    """Return a right-padded batch, on the CPU."""
    lengths = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.long)
    width = int(lengths.max()) if trajectories else 0
    return RolloutBatch(
        tokens=_padded([t.tokens for t in trajectories], width, 0, torch.long),
        attention=torch.arange(width) < lengths[:, None],
        mask=_padded([t.mask for t in trajectories], width, False, torch.bool),
        rollout_logps=_padded([t.logps for t in trajectories], width, 0.0, torch.float32),
        group=torch.tensor([t.group for t in trajectories], dtype=torch.long),
        versions=_padded([t.versions for t in trajectories], width, -1, torch.long),
    )


def add_rewards(batch: RolloutBatch, trajectories: Sequence[Trajectory]) -> Batch:
    """Return a batch with the rewards of its trajectories, which all were scored and have tokens of the policy.

    The reward sits on the last token that the policy chose; a turn's reward on the last token of that turn.

    Raises:
        ValueError: A trajectory has no reward, or no token of the policy.
    """
    width = batch.tokens.shape[1]
    names = tuple(sorted({name for t in trajectories if t.score for name in t.score.components}))
    components = [[t.score.components.get(name, 0.0) for name in names] for t in trajectories if t.score]
    rewards = _padded([_token_rewards(t) for t in trajectories], width, 0.0, torch.float32).to(batch.tokens.device)
    table = torch.tensor(components, dtype=torch.float32).reshape(len(trajectories), len(names))
    return Batch(
        **{f.name: getattr(batch, f.name) for f in fields(RolloutBatch)},
        token_rewards=rewards,
        rewards=rewards.sum(-1),
        components=table.to(batch.tokens.device),
        component_names=names,
    )


def _padded(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: torch.dtype) -> Tensor:
    full = [[*row] + [fill] * (width - len(row)) for row in rows]
    return torch.tensor(full, dtype=dtype).reshape(len(rows), width)


def _token_rewards(trajectory: Trajectory) -> list[float]:
    score = trajectory.score
    chosen = [i for i, mine in enumerate(trajectory.mask) if mine]
    if score is None or score.reward is None or not chosen:
        raise ValueError(f"trajectory of prompt {trajectory.prompt.id!r} has no reward, or no token of the policy")
    row = [0.0] * len(trajectory.tokens)
    row[chosen[-1]] += score.reward
    ends = [turn.end - 1 for turn in trajectory.turns if turn.role == "assistant"]
    for rewards in (score.turn_rewards, trajectory.turn_rewards):
        for end, reward in zip(ends, rewards, strict=True) if rewards else ():
            row[end] += reward
    return row
