"""MLflow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from rlkit.interfaces.callback import LoggedRun
from rlkit.loggers.lightning import LightningLogger
from rlkit.names import OutputPath

if TYPE_CHECKING:
    from lightning.pytorch.loggers import Logger as LightningsLogger


class MLflow(LightningLogger):
    """MLflow's tracking; a resumed run goes on in the same run.

    Args:
        experiment: The experiment's name.
        tracking_uri: The server or store; null takes MLFLOW_TRACKING_URI, or `mlflow.db` in the run folder.
        name: The run's name; null takes the run folder's.
    """

    package = "mlflow"

    def __init__(
        self, experiment: str = "rlkit", tracking_uri: OutputPath | None = None, name: str | None = None
    ) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.name = name

    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's MLFlowLogger; the server's name of the run is kept in `mlflow-run` of the run folder."""
        from lightning.pytorch.loggers import MLFlowLogger

        kept = run.folder / "mlflow-run"
        here = f"sqlite:///{run.folder.resolve()}/mlflow.db"
        logger = MLFlowLogger(
            self.experiment,
            self.name or run.folder.name,
            tracking_uri=self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", here),
            run_id=kept.read_text(encoding="utf-8").strip() if os.path.isfile(kept) else None,
        )
        if logger.run_id is not None:
            kept.write_text(logger.run_id, encoding="utf-8")
        return logger
