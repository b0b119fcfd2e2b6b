"""The section `log:` of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.base.ranges import NonNegativeInt, PositiveInt
from rlkit.interfaces.callback import Logger


@dataclass
class RolloutLog:
    """The trajectories that the run folder keeps: about 10 bytes per token.

    Args:
        every: Steps between two files; 0 for no files, validations included.
        limit: Maximum number of trajectories of a step over all ranks, in complete groups and at least one group; null
            for all. All trajectories of a validation are kept.
    """

    every: NonNegativeInt = 1
    limit: PositiveInt | None = 64


@dataclass
class Log:
    """Loggers of metrics besides `metrics.jsonl`, and the trajectories that are kept.

    Args:
        loggers: Loggers of the metrics: `Wandb`, `TensorBoard`, `MLflow`, `CSV` or one from a plugin.
        rollouts: Trajectories that are kept.
    """

    loggers: list[Logger] = field(default_factory=list)
    rollouts: RolloutLog = field(default_factory=RolloutLog)
