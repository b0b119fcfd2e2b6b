"""The base of loggers that wrap Lightning's."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from rlkit.errors import RecipeError
from rlkit.interfaces.callback import LoggedRun, Logger

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger


class LightningLogger(Logger):
    """Logs through one of Lightning's loggers, whose package may not be installed."""

    package: ClassVar[str]
    """Name of the distribution that provides the package."""

    @abstractmethod
    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's logger."""

    def open(self, run: LoggedRun) -> None:
        """Create the logger and its run.

        Raises:
            RecipeError: The package is not installed.
        """
        try:
            self._logger = self.make(run)
            self._logger.experiment  # type: ignore[attr-defined]  # noqa: B018 (creates the run, or fails now)
        except ModuleNotFoundError as error:
            name = type(self).__name__
            raise RecipeError(
                f"log.loggers has {name}, which needs the package {self.package}: pip install "
                f"'rlkit-fabric[{name.lower()}]' ({error})"
            ) from error

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics and write them out."""
        self._logger.log_metrics(dict(metrics), step)
        self._logger.save()

    def finalize(self, status: str) -> None:
        """End the logger."""
        self._logger.finalize(status)
