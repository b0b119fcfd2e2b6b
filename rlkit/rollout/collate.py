"""The door from ragged Python objects to tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from math import nan
from struct import pack

import torch
from torch import Tensor

from rlkit.interfaces.fields import Field
from rlkit.types import Batch, RolloutBatch, Trajectory


def collate(trajectories: Sequence[Trajectory], declared: Sequence[Field] = ()) -> RolloutBatch:
    """Return a right-padded batch, on the CPU, with the declared fields that are filled before the scores."""
    lengths = torch.tensor([len(t.tokens) for t in trajectories], dtype=torch.long)
    attention = torch.arange(int(lengths.max()) if trajectories else 0) < lengths[:, None]

    def padded(values: Callable[[Trajectory], Iterable[float]], code: str, kind: torch.dtype, fill: float) -> Tensor:
        full = torch.full(attention.shape, fill, dtype=kind)
        return full.masked_scatter_(attention, _flat(map(values, trajectories), code, kind))

    media = tuple(t.media for t in trajectories)
    has_candidates = any(t.candidates for t in trajectories)
    return RolloutBatch(
        tokens=padded(lambda t: t.tokens, "q", torch.long, 0),
        attention=attention,
        mask=padded(lambda t: t.mask, "b", torch.bool, False),
        rollout_logps=padded(lambda t: t.logps, "f", torch.float32, 0.0),
        group=torch.tensor([t.group for t in trajectories], dtype=torch.long),
        versions=padded(lambda t: t.versions, "q", torch.long, -1),
        media=media if any(media) else None,
        candidates=_candidates(trajectories, attention.shape) if has_candidates else None,
        fields={spec.name: _padded(spec, trajectories, attention.shape[1]) for spec in declared},
        declared={spec.name: spec for spec in declared},
    )


def add_rewards(batch: RolloutBatch, trajectories: Sequence[Trajectory], declared: Sequence[Field] = ()) -> Batch:
    """Return a batch with the rewards of its trajectories, which all were scored and have tokens of the policy.

    The reward sits on the last token that the policy chose; a turn's reward on the last token of that turn, and a
    token's on itself. The declared fields are those that the scores fill.

    Raises:
        ValueError: A trajectory has no reward, or no token of the policy.
    """
    names = tuple(sorted({name for t in trajectories if t.score for name in t.score.components}))
    components = [[t.score.components.get(name, nan) for name in names] for t in trajectories if t.score]
    token_rewards = [(row, *token_reward) for row, t in enumerate(trajectories) for token_reward in _rewards(t)]
    rows, columns, values = zip(*token_rewards, strict=True) if token_rewards else ((), (), ())
    rewards = torch.zeros(batch.tokens.shape, dtype=torch.float32)
    at = (torch.tensor(rows, dtype=torch.long), torch.tensor(columns, dtype=torch.long))
    rewards.index_put_(at, torch.tensor(values, dtype=torch.float32), accumulate=True)
    rewards = rewards.to(batch.tokens.device)
    table = torch.tensor(components, dtype=torch.float32).reshape(len(trajectories), len(names))
    width, device = batch.tokens.shape[1], batch.tokens.device
    scored = {spec.name: _padded(spec, trajectories, width).to(device) for spec in declared}
    specs = {spec.name: spec for spec in declared}
    batch = replace(batch, fields={**batch.fields, **scored}, declared={**batch.declared, **specs})
    return Batch(
        **{f.name: getattr(batch, f.name) for f in fields(RolloutBatch)},
        token_rewards=rewards,
        rewards=Batch.row_sums(rewards),
        components=table.to(batch.tokens.device),
        component_names=names,
    )


def _candidates(trajectories: Sequence[Trajectory], shape: torch.Size) -> Tensor:
    """Return the candidates [B,T,K] i32 of each token, padded with -1."""
    most = max(len(ids) for t in trajectories for ids in t.candidates)
    padded = torch.full((*shape, most), -1, dtype=torch.int32)
    for row, trajectory in enumerate(trajectories):
        counts = torch.tensor([len(ids) for ids in trajectory.candidates], dtype=torch.long)
        present = torch.arange(most) < counts[:, None]
        padded[row, : len(counts)][present] = _flat(trajectory.candidates, "i", torch.int32)
    return padded


def _padded(spec: Field, trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """Return the values of a field as a batch has them; padding in rows without."""
    turns = max((sum(turn.role == "assistant" for turn in t.turns) for t in trajectories), default=0)
    batched = spec.full(len(trajectories), *spec.sizes(width, turns))
    for row, trajectory in zip(batched, trajectories, strict=True):
        filled = {**(trajectory.score.fields if trajectory.score else {}), **trajectory.fields}.get(spec.name)
        if filled is not None:
            (row if spec.by == "row" else row[: len(filled)]).copy_(filled)
    return batched


def _flat(rows: Iterable[Iterable[float]], code: str, kind: torch.dtype) -> Tensor:
    """Return the values of all rows, one after another, packed as a type of C; much faster than from lists."""
    values: list[float] = []
    for row in rows:
        values += row
    packed = bytearray(pack(f"{len(values)}{code}", *values))
    return torch.frombuffer(packed, dtype=kind) if values else torch.empty(0, dtype=kind)


def _rewards(trajectory: Trajectory) -> list[tuple[int, float]]:
    """Return the places of tokens that have a reward, and what is added there."""
    score = trajectory.score
    if score is None or score.reward is None or True not in trajectory.mask:
        raise ValueError(f"trajectory of prompt {trajectory.prompt.id!r} has no reward, or no token of the policy")
    last = len(trajectory.mask) - 1 - trajectory.mask[::-1].index(True)
    turns = [rewards for rewards in (score.turn_rewards, trajectory.turn_rewards) if rewards and any(rewards)]
    ends = [turn.end - 1 for turn in trajectory.turns if turn.role == "assistant"] if turns else []
    chosen = [index for index, own in enumerate(trajectory.mask) if own] if score.token_rewards else []
    by_turn = [pair for rewards in turns for pair in zip(ends, rewards, strict=True)]
    return [(last, score.reward), *by_turn, *zip(chosen, score.token_rewards or (), strict=True)]
