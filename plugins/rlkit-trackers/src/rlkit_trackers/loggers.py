"""Loggers of metrics to products that keep experiments, and to TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlkit.base.names import OutputPath
from rlkit.interfaces.callback import LoggedRun
from rlkit_trackers.packaged import LightningLogger, PackagedLogger, saved_id

if TYPE_CHECKING:
    from clearml import Task
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

        local_uri = f"sqlite:///{run.folder.resolve()}/mlflow.db"
        logger = MLFlowLogger(
            self.experiment,
            self.name or run.folder.name,
            tracking_uri=self.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI", local_uri),
            run_id=saved_id(run.folder, "mlflow-run"),
        )
        if logger.run_id is not None:
            (run.folder / "mlflow-run").write_text(logger.run_id, encoding="utf-8")
        return logger


class RunLogger(PackagedLogger):
    """Logs to a run of a package with W&B's interface, `_run`, which `start` creates."""

    _run: Any

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics."""
        self._run.log(dict(metrics), step=step)


class Trackio(RunLogger):
    """Trackio: a local dashboard (`trackio show`), or one in a Space; a resumed run continues the same Trackio run.

    Args:
        project: Name of the project.
        name: Name of the run, unique in the project; null for the name of the run folder with the run's id.
        space_id: The Space of the dashboard, such as `user/name`; null for this machine.
    """

    package = "trackio"

    def __init__(self, project: str = "rlkit", name: str | None = None, space_id: OutputPath | None = None) -> None:
        self.project = project
        self.name = name
        self.space_id = space_id

    def start(self, run: LoggedRun) -> None:
        """Start a run, or continue the one of this name."""
        import trackio

        name = self.name or f"{run.folder.name}-{run.run_id}"
        options = {"space_id": self.space_id, "config": dict(run.recipe), "resume": "allow", "embed": False}
        self._run = trackio.init(self.project, name, **options)

    def finalize(self, status: str) -> None:
        """Upload what remains."""
        self._run.finish()


class SwanLab(RunLogger):
    """SwanLab; a resumed run continues the same SwanLab run.

    Args:
        project: Name of the project.
        name: Name of the run; null for the name of the run folder.
        offline: Whether to write to the run folder only, for `swanlab sync`.
    """

    package = "swanlab"

    def __init__(self, project: str = "rlkit", name: str | None = None, offline: bool = False) -> None:
        self.project = project
        self.name = name
        self.offline = offline

    def start(self, run: LoggedRun) -> None:
        """Start a run, or continue the one with the run's id."""
        import swanlab

        self._run = swanlab.init(
            project=self.project,
            name=self.name or run.folder.name,
            mode="offline" if self.offline else "online",
            log_dir=str(run.folder / "swanlab"),
            config=dict(run.recipe),
            settings=swanlab.Settings(
                probe=swanlab.Settings.Probe(runtime=False)
            ),  # it reads the kernel's command line
            **{"id": run.run_id, "resume": "allow", "reinit": True},
        )

    def finalize(self, status: str) -> None:
        """End the run."""
        self._run.finish(state="success" if status == "success" else "crashed")


class ClearML(PackagedLogger):
    """ClearML; a resumed run continues the same task.

    Args:
        project: Name of the project.
        name: Name of the task; null for the name of the run folder.
        offline: Whether to write to ClearML's cache only, for `Task.import_offline_session`; a resumed run has a
            session of its own.
    """

    package = "clearml"
    _task: Task

    def __init__(self, project: str = "rlkit", name: str | None = None, offline: bool = False) -> None:
        self.project = project
        self.name = name
        self.offline = offline

    def start(self, run: LoggedRun) -> None:
        """Start a task that watches nothing by itself; `clearml-task` in the run folder stores its id."""
        from clearml import Task

        # its reports come from threads: it would fork this process while another thread of its own starts git, which
        # then waits for ever for a pipe that the fork holds
        Task._report_subprocess_enabled = False
        Task.set_offline(self.offline)
        last = None if self.offline else saved_id(run.folder, "clearml-task")
        unwatched = dict.fromkeys(("auto_connect_arg_parser", "auto_connect_frameworks", "auto_connect_streams"), False)
        self._task = Task.init(
            self.project,
            self.name or run.folder.name,
            reuse_last_task_id=False,
            continue_last_task=last or False,
            **unwatched,
        )
        if last:
            self._task.set_initial_iteration(0)  # steps are counted from the start of the run
        elif not self.offline:
            (run.folder / "clearml-task").write_text(self._task.id, encoding="utf-8")
        self._task.connect_configuration(dict(run.recipe), name="recipe")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the metrics, each in the chart of its group."""
        for name, value in metrics.items():
            group, _, series = name.partition("/")
            self._task.get_logger().report_scalar(group, series or group, value, step)

    def finalize(self, status: str) -> None:
        """Write out what remains and close the task."""
        if status != "success":
            self._task.mark_failed(ignore_errors=True, status_message="the run failed")
        self._task.close()
