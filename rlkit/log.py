"""The section `log:` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.ranges import NonNegativeInt, PositiveInt


@dataclass
class Wandb:
    """Weights & Biases.

    Args:
        project: The project.
        name: The run's name; null takes the run folder's.
        offline: Write to the run folder only.
    """

    project: str
    name: str | None = None
    offline: bool = False


@dataclass
class RolloutLog:
    """Which trajectories the run folder keeps: about 10 bytes a token.

    Args:
        every: Steps between two files; 0 for none at all, those of validations included.
        limit: Trajectories of a file at most, over all ranks, in whole groups and at least one; null for all.
    """

    every: NonNegativeInt = 1
    limit: PositiveInt | None = 64


@dataclass
class Log:
    """What is kept of a run besides its figures, and where these go besides the run folder.

    Args:
        wandb: Weights & Biases.
        rollouts: Which trajectories are kept.
    """

    wandb: Wandb | None = None
    rollouts: RolloutLog = field(default_factory=RolloutLog)
