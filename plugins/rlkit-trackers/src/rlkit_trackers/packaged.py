"""Loggers through packages that may not be installed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rlkit.base.errors import RecipeError
from rlkit.base.files import read_inside
from rlkit.base.installed import extra_command
from rlkit.interfaces.callback import LoggedRun, Logger

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger

MAX_ID_BYTES = 1000


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
