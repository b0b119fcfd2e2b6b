"""The section `log:` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.interfaces.callback import Logger
from rlkit.ranges import NonNegativeInt, PositiveInt


@dataclass
class RolloutLog:
    """Which trajectories the run folder keeps: about 10 bytes a token.

    Args:
        every: Steps between two files; 0 for none at all, those of validations included.
        limit: Trajectories of a step at most, over all ranks, in whole groups and at least one; null for all. Of a
            validation all are kept.
    """

    every: NonNegativeInt = 1
    limit: PositiveInt | None = 64


@dataclass
class Log:
    """What is kept of a run besides its metrics, and where these go besides `metrics.jsonl`.

    Args:
        loggers: Where metrics go: `Wandb`, `TensorBoard`, `MLflow`, `CSV` or a plugin's.
        rollouts: Which trajectories are kept.
    """

    loggers: list[Logger] = field(default_factory=list)
    rollouts: RolloutLog = field(default_factory=RolloutLog)
