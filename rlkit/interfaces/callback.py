"""The interfaces of callbacks, which watch a run, and of loggers, which log its metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import Batch, JsonObject, Trajectory

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""Plain data, as JSON holds it."""


@dataclass(frozen=True)
class RunStart:
    """The run, before its first step.

    Args:
        folder: Run folder, visible to all ranks.
        recipe: All options by section, as plain data.
        steps: Number of the last step.
        done: Number of completed steps: 0 unless the run is resumed.
        rank: Index of this rank.
        world_size: Number of ranks.
    """

    folder: Path
    recipe: Mapping[str, Any]
    steps: int
    done: int
    rank: int
    world_size: int


@dataclass(frozen=True)
class RolloutsEnd:
    """The trajectories of a step, sampled but not scored yet.

    Args:
        step: Number of the step, from 1.
        trajectories: Trajectories of this rank, including failed ones.
    """

    step: int
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True)
class TrainingBatch:
    """The batch of the next update.

    Args:
        step: Number of the step, from 1.
        batch: Rows of this rank, with rewards, log-probs and advantages. Changes to it change the update.
    """

    step: int
    batch: Batch


@dataclass(frozen=True)
class StepEnd:
    """A completed step.

    Args:
        step: Number of the step, from 1.
        metrics: The step's line of `metrics.jsonl`, the same on all ranks. A callback may add finite numbers under new
            names, which are logged as means over the ranks that add them.
    """

    step: int
    metrics: dict[str, float]


@dataclass(frozen=True)
class ValidationEnd:
    """A completed validation.

    Args:
        step: Number of completed steps: 0 before training.
        metrics: `accuracy`, `reward` and so on, the same on all ranks.
        trajectories: Scored trajectories of this rank.
    """

    step: int
    metrics: Mapping[str, float]
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True)
class CheckpointSaved:
    """A complete checkpoint.

    Args:
        step: The step that it was taken after; the run may be further.
        place: Folder or fsspec URL of the checkpoint.
    """

    step: int
    place: str


@dataclass(frozen=True)
class RunEnd:
    """How a run ended.

    Args:
        status: `ok`, `interrupted` or `failed`.
        steps: Number of completed steps.
        error: The error that ended the run; None if it did not fail.
    """

    status: str
    steps: int
    error: str | None


class Callback(BoundPart):
    """Watches a run on every rank. Override the methods that you need.

    A call blocks the run; a method that exceeds its budget is named in one warning. An exception ends the run on all
    ranks, as with Lightning's callbacks, and names the callback and the rank. In `on_run_end`, which ends after its
    budget, it is a warning. Setting `should_stop` on any rank makes the step in progress the last one. The return value
    of `state_dict` is part of each checkpoint and is restored on resume.
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
    """Seconds that a call of each method may take before a warning names it; a class may change them."""

    should_stop: bool = False
    """Whether the step in progress is the last one."""

    lr_factor: float = 1.0
    """Factor of the later steps' learning rates, the critic's included; rank 0's is used, and checkpoints hold it."""

    def on_run_start(self, event: RunStart) -> None:
        """Called once models and, on resume, the checkpoint are loaded, after `load_state_dict` and before any step."""

    def on_rollouts(self, event: RolloutsEnd) -> None:
        """Called once the trajectories of a step are sampled; their rewards may still be being scored."""

    def on_batch(self, event: TrainingBatch) -> None:
        """Called once advantages are computed, before the update."""

    def on_step_end(self, event: StepEnd) -> None:
        """Called once the models are updated, the engine has the weights, and the step's metrics are complete."""

    def on_validation(self, event: ValidationEnd) -> None:
        """Called after each validation: before training, every `validation.every` steps and after training."""

    def on_checkpoint(self, event: CheckpointSaved) -> None:
        """Called once a checkpoint is complete, after a later step or at the end, since the run continues meanwhile."""

    def on_run_end(self, event: RunEnd) -> None:
        """Called once `final/` and `result.json` are written, unless a second signal ended the run at once."""

    def state_dict(self) -> dict[str, Json]:
        """Return the state for the next checkpoint, as JSON values; rank 0's is saved."""
        return {}

    def load_state_dict(self, state: JsonObject) -> None:
        """Restore on every rank what `state_dict` returned."""


@dataclass(frozen=True)
class LoggedRun:
    """The run whose metrics are logged.

    Args:
        folder: Run folder.
        run_id: Name of the run in loggers; a resumed run has the same.
        recipe: All options by section, as plain data.
        done: Number of completed steps: 0 unless the run is resumed. Later steps may have been logged before.
    """

    folder: Path
    run_id: str
    recipe: Mapping[str, Any]
    done: int


class Logger(ABC):
    """Logs the metrics of each step on rank 0, in a thread of its own: the run does not wait for it.

    `open` refuses the run with `rlkit.base.errors.RecipeError` if a package is missing. Other failures, and metrics
    that a slow logger drops, are warnings.
    """

    def open(self, run: LoggedRun) -> None:
        """Start logging, before any model is loaded."""

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics of a step."""

    def log_answers(self, answers: Sequence[Mapping[str, str | float | None]], step: int) -> None:
        """Log greedy completions of a validation: `prompt`, `answer` (the reference), `text`, `reward`, `stop`."""

    def finalize(self, status: str) -> None:
        """End logging; `status` is `success` or `failed`."""
