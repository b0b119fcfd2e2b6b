"""The interfaces of what watches a run: callbacks, and the loggers of its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import Batch, Trajectory

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""Plain data, as JSON holds it."""


@dataclass(frozen=True)
class RunStart:
    """The run, before its first step.

    Args:
        folder: The run folder, which all ranks see.
        recipe: All options by section, as plain data.
        steps: The last step's number.
        done: Steps that are done: 0 unless the run is resumed.
        rank: This rank among `world_size`.
        world_size: Ranks.
    """

    folder: Path
    recipe: Mapping[str, Any]
    steps: int
    done: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class RolloutsEnd:
    """A step's trajectories, sampled and not yet scored.

    Args:
        step: The step, from 1.
        trajectories: Those that this rank sampled, failed conversations included.
    """

    step: int
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True)
class TrainingBatch:
    """The batch that the models are about to learn from.

    Args:
        step: The step, from 1.
        batch: This rank's rows, with rewards, log-probs and advantages. Read it: whatever is changed in it is learned.
    """

    step: int
    batch: Batch


@dataclass(frozen=True)
class StepEnd:
    """A step that is done.

    Args:
        step: The step, from 1.
        metrics: Its line of `metrics.jsonl`, the same on all ranks. Metrics that a callback adds arrive in that line
            and in loggers: finite numbers by new names; of several ranks' values, the mean.
    """

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ValidationEnd:
    """Held-out prompts that have been answered.

    Args:
        step: Steps that are done: 0 before training.
        metrics: `accuracy`, `reward` …, the same on all ranks.
        trajectories: This rank's answers, scored.
    """

    step: int
    metrics: Mapping[str, float]
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True)
class CheckpointSaved:
    """A checkpoint that is whole.

    Args:
        step: The step after which it was taken; the run may be further.
        place: Its folder or fsspec URL.
    """

    step: int
    place: str


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Args:
        status: `ok`, `interrupted` or `failed`.
        steps: Steps that are done.
        error: What ended it, where it failed.
    """

    status: str
    steps: int
    error: str | None


class Callback(BoundPart):
    """Watches a run, on every rank: override what you need.

    A call blocks the run. One that takes longer than its budget is named in a warning, once a method. An exception ends
    the run on all ranks, as with Lightning's callbacks, and names the callback and the rank; in `on_run_end`, which is
    not waited for beyond its budget, it is a warning. Setting `should_stop` on any rank makes the step in progress the
    last one. What `state_dict` returns is in each checkpoint and comes back on resume.
    """

    budgets: ClassVar[Mapping[str, float]] = {
        "on_run_start": 10.0,
        "on_rollouts": 1.0,
        "on_batch": 1.0,
        "on_step_end": 1.0,
        "on_validation": 5.0,
        "on_checkpoint": 5.0,
        "on_run_end": 10.0,
    }
    """Seconds that a call may take before a warning names it; a class may have others."""

    should_stop: bool = False
    """Whether the step in progress shall be the last."""

    lr_factor: float = 1.0
    """Multiplies the learning rates of later steps, the critic's included; rank 0's counts, and checkpoints hold it."""

    def on_run_start(self, event: RunStart) -> None:
        """Models are loaded and, on resume, the checkpoint; `load_state_dict` has been called, and no step begun."""

    def on_rollouts(self, event: RolloutsEnd) -> None:
        """A step's trajectories are sampled; their rewards may still be computed."""

    def on_batch(self, event: TrainingBatch) -> None:
        """Advantages are known; the update comes next."""

    def on_step_end(self, event: StepEnd) -> None:
        """The models are updated, the engine has the weights, and the step's metrics are complete."""

    def on_validation(self, event: ValidationEnd) -> None:
        """Held-out prompts are answered: before training, after each `validation.every` steps and after training."""

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """A checkpoint is whole. It is written beside the run, so that this comes after a later step, or at the end."""

    def on_run_end(self, event: RunEnd) -> None:
        """The run has ended, but for one that a second signal ended at once; `final/` and `result.json` are written."""

    def state_dict(self) -> dict[str, Json]:
        """Return what shall be in the next checkpoint, as JSON holds it; that of rank 0 is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back, on every rank, what `state_dict` returned."""


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are logged.

    Args:
        folder: The run folder.
        run_id: Names the run wherever it is logged; a resumed run has the same.
        recipe: All options by section, as plain data.
        done: Steps that are done: 0 unless the run is resumed; later steps may have been logged before and come again.
    """

    folder: Path
    run_id: str
    recipe: Mapping[str, Any]
    done: int


class Logger(ABC):
    """Logs the metrics of each step, on rank 0 alone, in a thread of its own: the run does not wait for it.

    A package that is missing refuses the run (`rlkit.errors.RecipeError`, raised by `open`). Anything else that fails,
    and metrics that a slow logger has no place for, is a warning.
    """

    def open(self, run: LoggedRun) -> None:
        """Start, before any model is loaded."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log a step's line of `metrics.jsonl`."""

    def log_answers(self, answers: Sequence[Mapping[str, str | float | None]], step: int) -> None:
        """Log some greedy answers of a validation: `prompt`, `answer` (the reference), `text`, `reward`, `stop` …"""

    def finalize(self, status: str) -> None:
        """End; `status` is `success` or `failed`."""
