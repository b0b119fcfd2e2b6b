"""The sections of validation, and of what a run writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rlkit.base.names import Name, OutputPath
from rlkit.base.ranges import NUMBER, NonNegativeInt, PositiveInt
from rlkit.interfaces.callback import Logger
from rlkit.interfaces.task import Task
from rlkit.types import Sampling


@dataclass
class Save:
    """Checkpoints: the complete state of a run, from which it resumes as if it had never stopped.

    Args:
        every: Steps between checkpoints; 0 for none during the run. The last step, or that of Ctrl-C, always has one.
        keep_last: The number of checkpoints to keep; older ones are removed.
        keep_best: A metric of `metrics.jsonl`, such as `validation/accuracy`, of which higher is better, or
            lower if it is a loss: the checkpoint of its best step is kept as well.
        optimizer: Whether checkpoints hold the state of optimizers: with AdamW two of three bytes when all weights are
            trained. A run that resumes from a checkpoint without it warns that moments start from zero.
        folder: A folder or any fsspec URL; null for `checkpoints/` in the run folder.
    """

    every: NonNegativeInt = 100
    keep_last: PositiveInt = 2
    keep_best: str | None = None
    optimizer: bool = True
    folder: OutputPath | None = None


@dataclass
class Validation:
    """Validation on held-out prompts, with greedy and sampled completions; null for none.

    Runs on recorded completions also measure the loss of those that the prompts record, and without a `reward:` only
    that.

    Args:
        before: Whether to validate before training.
        every: Steps between validations; 0 for none.
        after: Whether to validate after training.
        tasks: Tasks by name, of which the validation splits are used; null is the recipe's task. Metrics are reported
            by these names, but for the loss, which is of all of them, and the recipe's reward scores them all. Null for
            only the recipe's task.
        limit: The number of prompts of each task, from the start of the split; null for all.
        samples: Sampled completions per prompt, besides the greedy one; 0 for none.
        sampling: Options of sampling; null for those of training.
        patience: The number of consecutive validations without a new best after which training ends; null for no end.
        watch: The metric of `patience`: higher is better, of `loss` lower.
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


@dataclass
class Profile:
    """Traces of single steps, in `profile/` of the run folder; null for none.

    With `torch`, each rank writes `step-00003.trace.json.gz` (open it at ui.perfetto.dev), `step-00003.txt` (operators
    by time) and, on a GPU, `step-00003.memory.pickle` (open it at pytorch.org/memory_viz). Profiled steps are slower;
    their results are the same. With `nsight`, the run writes nothing: the phases of these steps are NVTX ranges between
    cudaProfilerStart and cudaProfilerStop, for `nsys profile --capture-range=cudaProfilerApi`.

    Args:
        steps: The steps to profile, from 1.
        tool: What records them: `torch` or `nsight`.
    """

    steps: list[PositiveInt]
    tool: Literal["torch", "nsight"] = "torch"


@dataclass
class RolloutLog:
    """The trajectories that the run folder keeps: about 10 bytes per token.

    Args:
        every: Steps between two files; 0 for no files, validations included.
        limit: Maximum number of trajectories of a step over all ranks, in complete groups and at least one group; null
            for all. All trajectories of a validation are kept, and those of steps that follow a checkpoint, for
            `rlkit replay --phase learn`, if they have at most 4 million tokens on a rank.
    """

    every: NonNegativeInt = 1
    limit: PositiveInt | None = 64

    def limit_per_rank(self, ranks: int) -> int | None:
        """Return the maximum number of trajectories on each of so many ranks; None for all."""
        return None if self.limit is None else max(1, self.limit // ranks)


@dataclass
class Log:
    """Loggers of metrics besides `metrics.jsonl`, and the trajectories that are kept and printed.

    Args:
        loggers: Loggers of the metrics: `Wandb`, `TensorBoard`, `MLflow`, `Trackio`, `SwanLab`, `ClearML`, `CSV` or one
            from a plugin.
        rollouts: Trajectories that are kept.
        samples: Steps between completions that are printed with the end of their prompt and their reward; 0 for none,
            null for 10 on a terminal and none elsewhere.
    """

    loggers: list[Logger] = field(default_factory=list)
    rollouts: RolloutLog = field(default_factory=RolloutLog)
    samples: NonNegativeInt | None = None
