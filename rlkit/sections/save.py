"""What a run saves and validates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from rlkit.interfaces.task import Task
from rlkit.names import Name, OutputPath
from rlkit.ranges import NUMBER, NonNegativeInt, PositiveInt
from rlkit.types import Sampling


@dataclass
class Save:
    """Checkpoints: all that a run needs to resume as if it had never stopped.

    Args:
        every: Steps between checkpoints; 0 for none during the run. The last step, or that of a Ctrl-C, always has one.
        keep_last: How many to keep; older ones are removed.
        keep_best: A metric of `metrics.jsonl`, higher is better, such as `validation/accuracy`: the checkpoint of its
            best step is kept as well.
        folder: A folder or any fsspec URL; null for `checkpoints/` in the run folder.
    """

    every: NonNegativeInt = 100
    keep_last: PositiveInt = 2
    keep_best: str | None = None
    folder: OutputPath | None = None


@dataclass
class Validation:
    """Held-out prompts, answered greedily and by sampling; null for none.

    Args:
        before: Whether to validate before training.
        every: Steps between validations; 0 for none. That of the last step is the one after training, if there is one.
        after: Whether to validate after training.
        tasks: Tasks by name, whose validation splits are used, null for the recipe's task; metrics are shown apart by
            these names. The recipe's reward scores them all. Null for the recipe's task alone.
        limit: Prompts of each task, from the start of the split; null for all of it.
        samples: Sampled answers per prompt, besides the greedy one; 0 for none.
        sampling: How they are sampled; null for the sampling of training.
        patience: Training ends after so many validations in a row without a new best; null for never.
        watch: The metric of which the highest is best, for `patience`.
    """

    before: bool = True
    every: NonNegativeInt = 0
    after: bool = True
    tasks: dict[Name, Task | None] | None = None
    limit: PositiveInt | None = None
    samples: Annotated[int, Ge(0), Le(65536), NUMBER] = 1
    sampling: Sampling | None = None
    patience: PositiveInt | None = None
    watch: str = "accuracy"
