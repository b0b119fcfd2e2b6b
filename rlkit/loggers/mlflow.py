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
    """MLflow tracking; a resumed run continues the same MLflow run.

    Args:
        experiment: Name of the experiment.
        tracking_uri: Server or store; null for MLFLOW_TRACKING_URI, or `mlflow.db` in the run folder.
        name: Name of the run; null for the name of the run folder.
    """

    package = "mlflow"

    def __init__(
        self, experiment: str = "rlkit", tracking_uri: OutputPath | None = None, name: str | None = None
    ) -> None:
        self.experiment = experiment
        self.tracking_uri = tracking_uri
        self.name = name

    def make(self, run: LoggedRun) -> LightningsLogger:
        """Return Lightning's MLFlowLogger; `mlflow-run` in the run folder stores the server's id of the run."""
        from lightning.pytorch.loggers import MLFlowLogger

        id_file = run.folder / "mlflow-run"
        local_uri = f"sqlite:///{run.folder.resolve()}/mlflow.db"
        logger = MLFlowLogger(
            self.experiment,
            self.name or run.folder.name,
            tracking_uri=self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", local_uri),
            run_id=id_file.read_text(encoding="utf-8").strip() if os.path.isfile(id_file) else None,
        )
        if logger.run_id is not None:
            id_file.write_text(logger.run_id, encoding="utf-8")
        return logger
