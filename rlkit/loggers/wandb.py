"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlkit.interfaces.callback import LoggedRun
from rlkit.loggers.lightning import LightningLogger

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger


class Wandb(LightningLogger):
    """Weights & Biases, with a table of answers for each validation; a resumed run continues the same W&B run.

    Args:
        project: Name of the project.
        name: Name of the run; null for the name of the run folder.
        offline: Whether to write to the run folder only.
    """

    package = "wandb"

    def __init__(self, project: str, name: str | None = None, offline: bool = False) -> None:
        self.project = project
        self.name = name
        self.offline = offline

    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's WandbLogger."""
        from lightning.pytorch.loggers import WandbLogger

        return WandbLogger(
            name=self.name or run.folder.name,
            project=self.project,
            offline=self.offline,
            save_dir=run.folder,
            id=run.run_id,
            resume="allow",
        )

    def log_answers(self, answers: Sequence[Mapping[str, str | float | None]], step: int) -> None:
        """Log a table of answers."""
        if answers:
            rows = [list(answer.values()) for answer in answers]
            self._logger.log_table("validation/answers", list(answers[0]), rows, step=step)  # type: ignore[attr-defined]

    def finalize(self, status: str) -> None:
        """End the run. Lightning leaves it open, so that the next run of the process would be logged to it."""
        super().finalize(status)
        self._logger.experiment.finish(exit_code=0 if status == "success" else 1)  # type: ignore[attr-defined]
