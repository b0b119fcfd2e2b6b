"""What the run folder keeps of a step: the trajectories of its first groups, with what was made of their tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from rlkit.distributed.ranks import Ranks
from rlkit.interfaces.loss import Inputs
from rlkit.recipe import Recipe
from rlkit.train.rollouts import Rollouts, token_count, with_branches
from rlkit.types import TrainBatch, Trajectory

ALL = slice(None)
"""All rows of a batch."""

COMPLETE_BYTES = 40_000_000
"""Bytes of a step on a rank up to which a step that follows a checkpoint is kept complete."""
TOKEN_BYTES = 10
"""Bytes of a token in a compressed file, without its fields."""


def kept_trajectories(
    trajectories: Sequence[Trajectory], number: int, recipe: Recipe, ranks: Ranks
) -> Sequence[Trajectory] | None:
    """Return the trajectories of a step on this rank that the run folder keeps; None if the step has no file.

    A step that begins at a checkpoint or at the start is kept complete, so that `rlkit replay` can learn from it alone.
    """
    section, interval = recipe.log.rollouts, recipe.save.every
    if not section.every or number % section.every:
        return None
    follows_checkpoint = number == 1 or (interval > 0 and (number - 1) % interval == 0)
    samples = with_branches(trajectories)
    size = TOKEN_BYTES * token_count(trajectories) + sum(x.nbytes for s in samples for x in s.fields.values())
    if follows_checkpoint and size <= COMPLETE_BYTES:
        return trajectories
    return first_groups(trajectories, section.limit_per_rank(ranks.count))


def first_groups(trajectories: Sequence[Trajectory], limit: int | None) -> Sequence[Trajectory]:
    """Return the trajectories of the first groups that fit the limit, and of at least one group."""
    if limit is None or len(trajectories) <= limit:
        return trajectories
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    selected: list[Trajectory] = []
    for index in sorted(groups):
        if selected and len(selected) + len(groups[index]) > limit:
            break
        selected += groups[index]
    return selected


def attach_credit(
    recipe: Recipe,
    ranks: Ranks,
    rollouts: Rollouts,
    trajectories: Sequence[Trajectory],
    batch: TrainBatch,
    *,
    number: int,
) -> None:
    """Copy what was made of trajectories, the rows of the batch, into their `credit`, if the run folder keeps them."""
    kept = kept_trajectories(rollouts.all, number, recipe, ranks)
    if kept is None:
        return
    groups = {trajectory.group for trajectory in kept}
    rows = [row for row, trajectory in enumerate(trajectories) if trajectory.group in groups]
    attached = [trajectories[row] for row in rows]
    if Inputs.ADVANTAGES in recipe.loss.inputs:
        attach_advantages(attached, batch, rows)
    attach_first_pass(attached, batch, rows)


def attach_advantages(trajectories: Sequence[Trajectory], batch: TrainBatch, rows: slice | list[int] = ALL) -> None:
    """Copy what was made of trajectories, some rows of the batch, into their `credit`, for the run folder."""
    for name, tensor in (("advantages", batch.advantages), ("values", batch.values)):
        if tensor is not None:
            _attach(name, tensor[rows], 5, trajectories)


def attach_first_pass(trajectories: Sequence[Trajectory], batch: TrainBatch, rows: slice | list[int] = ALL) -> None:
    """Copy the trainer's log-probs and the entropies before the update into `credit`, where they were computed."""
    for name, tensor, decimals in (("trainer_logps", batch.trainer_logps, 5), ("entropy", batch.entropy, 3)):
        if tensor is not None:
            values = tensor[rows]
            computed = (~values.isnan() & batch.mask[rows]).any(-1)
            selected = [t for t, has_values in zip(trajectories, computed.tolist(), strict=True) if has_values]
            _attach(name, values[computed], decimals, selected)


def _attach(name: str, values: Tensor, decimals: int, trajectories: Sequence[Trajectory]) -> None:
    """Copy numbers that nothing learns from again: rounded, and with 0 for 0.0 and -0.0."""
    for trajectory, row in zip(trajectories, values.double().round(decimals=decimals).tolist(), strict=True):
        trajectory.credit[name] = [x or 0 for x in row[: len(trajectory.tokens)]]
