"""TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit.interfaces.callback import LoggedRun
from rlkit.loggers.lightning import LightningLogger
from rlkit.names import OutputPath

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger


class TensorBoard(LightningLogger):
    """TensorBoard's event files, in `tensorboard/` of the run folder or of another.

    Args:
        folder: Where the folders of runs are; null takes the run folder.
    """

    package = "tensorboard"

    def __init__(self, folder: OutputPath | None = None) -> None:
        self.folder = folder

    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's TensorBoardLogger, which hides the steps that a resumed run makes again."""
        from lightning.pytorch.loggers import TensorBoardLogger

        place, name = (run.folder, "tensorboard") if self.folder is None else (self.folder, run.folder.name)
        return TensorBoardLogger(place, name, version="", default_hp_metric=False, purge_step=run.done + 1)
