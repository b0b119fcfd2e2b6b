"""Loggers of metrics; those of products need packages that may not be installed."""

from __future__ import annotations

import csv
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlkit.base.errors import RecipeError
from rlkit.base.files import read_inside
from rlkit.base.installed import extra_command
from rlkit.base.names import FileName, OutputPath
from rlkit.interfaces.callback import LoggedRun, Logger
from rlkit.registry.shelf import attribute_of

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger

__all__ = ["CSV", "TensorBoard", "Wandb"]

__getattr__ = attribute_of("loggers")

MAX_ID_BYTES = 1000


class CSV(Logger):
    """A table in the run folder with a column for each metric; a resumed run keeps its rows, unlike with Lightning's.

    Args:
        file: Name of the file.
    """

    def __init__(self, file: FileName = "metrics.csv") -> None:
        self.file = file
        self._complete = False

    def open(self, run: LoggedRun) -> None:
        """Read the rows of the completed steps."""
        self._path = run.folder / self.file
        self._rows = [row for row in _read(self._path) if _step(row) <= run.done]
        self._columns = list(dict.fromkeys(name for row in self._rows for name in row)) or ["step"]
        self._rewrite()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a row; rewrite the table if the row has new columns."""
        row = {"step": str(step), **{name: str(value) for name, value in metrics.items()}}
        self._rows.append(row)
        new_columns = [name for name in row if name not in self._columns]
        self._columns += new_columns
        if new_columns or not self._complete:
            self._rewrite()
            return
        self._complete = False
        with self._path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, self._columns).writerow(row)
        self._complete = True

    def finalize(self, status: str) -> None:
        """Write the rows that could not be written before, for example because the disk was full."""
        if not self._complete:
            self._rewrite()

    def _rewrite(self) -> None:
        self._complete = False
        partial = self._path.with_suffix(".partial")
        try:
            with partial.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, self._columns)
                writer.writeheader()
                writer.writerows(self._rows)
            partial.replace(self._path)
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        self._complete = True


def _read(path: Path) -> list[dict[str, str]]:
    if not os.path.isfile(path):
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [{k: v for k, v in row.items() if k and v} for row in csv.DictReader(file)]


def _step(row: Mapping[str, str]) -> float:
    """Return a row's step; infinity for a row without one, which a killed process truncated."""
    text = row.get("step", "")
    return int(text) if text.isdecimal() else float("inf")


def saved_id(folder: Path, name: str) -> str | None:
    """Return a tracker's id of the run, from a file of the run folder; None at its start."""
    try:
        return read_inside(folder, name, MAX_ID_BYTES).decode().strip()
    except FileNotFoundError:
        return None


class PackagedLogger(Logger):
    """Logs through a package that may not be installed; `package` is the distribution that provides it."""

    package: ClassVar[str]

    @abstractmethod
    def start(self, run: LoggedRun) -> None:
        """Import the package and start its run."""

    def open(self, run: LoggedRun) -> None:
        """Start the package's run.

        Raises:
            RecipeError: The package is not installed.
        """
        try:
            self.start(run)
        except ModuleNotFoundError as error:
            name = type(self).__name__
            raise RecipeError(
                f"log.loggers has {name}, which needs the package {self.package}, which is not installed ({error}): "
                f"{extra_command(name.lower())}"
            ) from error


class LightningLogger(PackagedLogger):
    """Logs through one of Lightning's loggers."""

    @abstractmethod
    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's logger."""

    def start(self, run: LoggedRun) -> None:
        """Create the logger and its run."""
        self._logger = self.make(run)
        self._logger.experiment  # type: ignore[attr-defined]  # noqa: B018 (creates the run, or fails now)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics and write them out."""
        self._logger.log_metrics(dict(metrics), step)
        self._logger.save()

    def finalize(self, status: str) -> None:
        """End the logger."""
        self._logger.finalize(status)


class TensorBoard(LightningLogger):
    """TensorBoard event files, in `tensorboard/` of the run folder or in another folder.

    Args:
        folder: Folder with one subfolder per run; null for `tensorboard/` of the run folder.
    """

    package = "tensorboard"

    def __init__(self, folder: OutputPath | None = None) -> None:
        self.folder = folder

    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's TensorBoardLogger, which hides the steps that a resumed run repeats."""
        from lightning.pytorch.loggers import TensorBoardLogger

        parent, name = (run.folder, "tensorboard") if self.folder is None else (self.folder, run.folder.name)
        return TensorBoardLogger(parent, name, version="", default_hp_metric=False, purge_step=run.done + 1)


class Wandb(LightningLogger):
    """Weights & Biases, with a table of answers for each validation; a resumed run continues the same W&B run.

    Args:
        project: Name of the project.
        name: Name of the run; null for the name of the run folder.
        offline: Whether to write to the run folder only.
        entity: User or team that owns the project; null for the account's default.
        group: Name under which W&B groups runs; null for none.
        tags: Labels of the run.
    """

    package = "wandb"

    def __init__(
        self,
        project: str,
        name: str | None = None,
        offline: bool = False,
        *,
        entity: str | None = None,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        self.project = project
        self.name = name
        self.offline = offline
        self.entity = entity
        self.group = group
        self.tags = tags

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
            entity=self.entity,
            group=self.group,
            tags=list(self.tags),
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
