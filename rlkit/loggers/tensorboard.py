"""TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlkit.interfaces.callback import LoggedRun
from rlkit.loggers.lightning import LightningLogger
from rlkit.names import OutputPath

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger


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
