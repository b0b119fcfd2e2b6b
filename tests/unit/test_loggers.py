"""Loggers: what they write, what their failures cost, and how they go on in a resumed run."""

from __future__ import annotations

import csv
import json
import resource
import shutil
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_trackers.packaged import LightningLogger

from rlkit.base.errors import RecipeError
from rlkit.cli.main import main
from rlkit.interfaces.callback import LoggedRun, Logger
from rlkit.loggers import CSV, ClearML, MLflow, SwanLab, TensorBoard, Trackio, Wandb
from rlkit.run.metrics_log import LoggerThread, open_loggers
from tests.conftest import FAST, read_jsonl


def run_of(folder: Path, done: int = 0) -> LoggedRun:
    return LoggedRun(folder, "abc", {}, done)


def log(logger: Logger, run: LoggedRun, steps: range) -> list[str]:
    """Log steps through the run's boundary; return the warnings."""
    notes: list[str] = []
    [thread] = open_loggers([logger], run, notes.append)
    for step in steps:
        thread.log_metrics({"reward/mean": step / 4, "time/sample": 1.0}, step)
    thread.finalize("success")
    return notes


def test_a_table_goes_on_where_the_run_does_and_gets_new_columns(tmp_path: Path) -> None:
    assert log(CSV(), run_of(tmp_path), range(1, 4)) == []
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("4,0.")  # a killed process
    notes: list[str] = []
    [thread] = open_loggers([CSV()], run_of(tmp_path, done=2), notes.append)
    thread.log_metrics({"reward/mean": 0.5, "validation/accuracy": 1.0}, 3)
    thread.finalize("success")
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [row["reward/mean"] for row in rows] == ["0.25", "0.5", "0.5"]
    assert [row["validation/accuracy"] for row in rows] == ["", "", "1.0"]
    assert notes == []


@pytest.mark.parametrize("new", [{}, {"validation/accuracy": 1.0}])
def test_rows_that_find_no_room_are_written_later_and_complete(tmp_path: Path, new: dict[str, float]) -> None:
    """The second row does not fit, as on a full disk: neither appended nor, with a new column, in a new table."""
    logger, path = CSV(), tmp_path / "metrics.csv"
    logger.open(run_of(tmp_path))
    logger.log_metrics({"a": 0.5}, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 3, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            logger.log_metrics({"a": 0.25, **new}, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.csv"]
    logger.finalize("failed")
    with path.open() as file:
        assert [(row["step"], row["a"]) for row in csv.DictReader(file)] == [("1", "0.5"), ("2", "0.25")]


def test_tensorboard_hides_the_steps_that_are_made_again(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert log(TensorBoard(), run_of(tmp_path), range(1, 4)) == []
    assert log(TensorBoard(), run_of(tmp_path, done=2), range(3, 5)) == []
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5), (3, 0.75), (4, 1.0)]


@pytest.mark.slow
def test_mlflow_goes_on_in_the_same_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file:{tmp_path}/mlruns"
    assert log(MLflow(tracking_uri=uri), run_of(tmp_path), range(1, 3)) == []
    assert log(MLflow(tracking_uri=uri), run_of(tmp_path, done=2), range(3, 4)) == []
    client = MlflowClient(uri)
    [run] = client.search_runs([client.get_experiment_by_name("rlkit").experiment_id])
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert (tmp_path / "mlflow-run").read_text() == run.info.run_id


def test_mlflow_logs_to_option_environment_or_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def record(experiment: str, name: str, *, tracking_uri: str, run_id: str | None) -> Any:
        made.append(tracking_uri)
        return SimpleNamespace(run_id="r")

    monkeypatch.setattr("lightning.pytorch.loggers.MLFlowLogger", record)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    MLflow().make(run_of(tmp_path))
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    MLflow().make(run_of(tmp_path))
    MLflow(tracking_uri="http://127.0.0.1:2").make(run_of(tmp_path))
    assert made == [f"sqlite:///{tmp_path}/mlflow.db", "http://127.0.0.1:1", "http://127.0.0.1:2"]


def test_weights_and_biases_has_entity_group_and_tags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[dict[str, Any]] = []
    monkeypatch.setattr("lightning.pytorch.loggers.WandbLogger", lambda **options: taken.append(options))
    Wandb("p", entity="team", group="sweep", tags=["a", "b"]).make(run_of(tmp_path))
    Wandb("p").make(run_of(tmp_path))
    names = ("project", "entity", "group", "tags")
    assert [[options[name] for name in names] for options in taken] == [
        ["p", "team", "sweep", ["a", "b"]], ["p", None, None, []],
    ]  # fmt: skip


@pytest.mark.slow
def test_mlflow_keeps_a_database_in_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store of files is deprecated, and refused unless a variable allows it."""
    from mlflow.tracking import MlflowClient

    for name in ("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    assert log(MLflow(), run_of(tmp_path), range(1, 3)) == []
    assert log(MLflow(), run_of(tmp_path, done=2), range(3, 4)) == []
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    [run] = client.search_runs([client.get_experiment_by_name("rlkit").experiment_id])
    assert [m.step for m in client.get_metric_history(run.info.run_id, "reward/mean")] == [1, 2, 3]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_all_loggers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins after step 2, and makes step 3 again: each step is logged once, and Weights & Biases has one run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    loggers = "--log.loggers=[CSV, TensorBoard, {class_path: Wandb, init_args: {project: p, offline: true}}]"
    options = (*FAST, "--train.steps=3", "--validation=null", "--save={every: 1, keep_last: 3}", loggers, "--out=out")
    assert main(["fit", "--recipe=quickstart", *options]) == 0
    shutil.rmtree("out/checkpoints/step-000003")
    assert main(["fit", "--recipe=quickstart", *options, "--resume=auto"]) == 0
    rows = read_jsonl(Path("out/metrics.jsonl"))
    with Path("out/metrics.csv").open() as file:
        table = list(csv.DictReader(file))
    events = EventAccumulator("out/tensorboard").Reload().Scalars("reward/mean")
    expected = [(step, pytest.approx(rows[step - 1]["reward/mean"])) for step in range(1, 4)]
    assert [(row["step"], row["reward/mean"]) for row in rows] == expected
    assert [(int(row["step"]), float(row["reward/mean"])) for row in table] == expected
    assert [(event.step, event.value) for event in events] == expected
    run_id = json.loads(Path("out/environment.json").read_text())["run_id"]
    folders = Path("out/wandb").glob("offline-run-*")  # offline-run-TIME-ID, with a number if both began in one second
    assert [folder.name.split("-")[3] for folder in folders] == [run_id, run_id]


@pytest.mark.slow
def test_answers_of_validations_are_tables_in_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wandb = "--log.loggers=[{class_path: Wandb, init_args: {project: p, offline: true}}]"
    few = ("--train.steps=1", "--validation={limit: 2, after: false}", "--train.prompts_per_step=2")
    assert main(["fit", "--recipe=quickstart", *few, wandb, "--out=out"]) == 0
    [path] = Path("out/wandb").glob("offline-run-*/files/media/table/validation/answers_*.table.json")
    table = json.loads(path.read_text())
    names = ["source", "prompt", "answer", "text", "final_answer", "reward", "accuracy", "length", "stop"]
    assert table["columns"] == names
    saved = [row for row in read_jsonl(Path("out/rollouts/validation-before.jsonl.gz")) if row["kind"] == "greedy"]
    assert [dict(zip(names, row, strict=True))["text"] for row in table["data"]] == [row["text"] for row in saved]
    assert [row[1] for row in table["data"]] == [f"user: {row['messages'][0]['content']}" for row in saved]


@pytest.mark.parametrize(
    ("logger", "modules", "package"),
    [
        (Wandb("p"), ["wandb"], "wandb"),
        (TensorBoard(), ["tensorboard", "tensorboardX", "torch.utils.tensorboard"], "tensorboard"),
        (MLflow(), ["mlflow", "mlflow.tracking"], "mlflow"),
        (Trackio(), ["trackio"], "trackio"),
        (SwanLab(), ["swanlab"], "swanlab"),
        (ClearML(), ["clearml"], "clearml"),
    ],
)
def test_a_missing_package_refuses_the_run(
    logger: Any, modules: list[str], package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lightning's logger finds it missing when it is made: here its import fails."""

    def missing(run: LoggedRun) -> Any:
        __import__(modules[0])

    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    if isinstance(logger, LightningLogger):
        monkeypatch.setattr(logger, "make", missing)
    name = type(logger).__name__
    expected = (
        rf"log.loggers has {name}, which needs the package {package}, which is not installed \(.*\): "
        rf"pip install -e '\.\[{package}\]' in a checkout of rlkit"
    )
    with pytest.raises(RecipeError, match=expected):
        open_loggers([logger], run_of(tmp_path), print)


class Odd(Logger):
    """Fails where it is told to."""

    def __init__(self, *failing: str) -> None:
        self.failing = failing
        self.logged: list[int] = []

    def open(self, run: LoggedRun) -> None:
        self._act("open")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._act("log_metrics")
        self.logged.append(step)

    def finalize(self, status: str) -> None:
        self._act("finalize")

    def _act(self, method: str) -> None:
        if method in self.failing:
            raise OSError("no network")


def test_loggers_see_no_credentials_in_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers upload `sys.argv`."""

    class Opened(Logger):
        def open(self, run: LoggedRun) -> None:
            self.arguments = list(sys.argv)

        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            pass

    command = ["rlkit", "fit", "--agent.environment.MODE=hunter2", "--reward.url=http://me:hunter2@h", "--train.lr=1"]
    monkeypatch.setattr("sys.argv", command)
    logger = Opened()
    log(logger, run_of(tmp_path), range(0))
    expected = ["rlkit", "fit", "--agent.environment.MODE=***", "--reward.url=http://***@h", "--train.lr=1"]
    assert logger.arguments == sys.argv == expected


def test_a_logger_that_fails_is_a_warning(tmp_path: Path) -> None:
    [warning] = log(Odd("open"), run_of(tmp_path), range(1, 4))
    assert warning.startswith("warning: logger Odd of tests: `open` raised OSError: no network (")
    warning, count = log(Odd("log_metrics"), run_of(tmp_path), range(1, 4))
    assert warning.startswith("warning: logger Odd of tests: `log_metrics` raised OSError: no network (")
    assert count == "warning: logger Odd of tests failed 3 times and missed 0 steps"
    fine = Odd()
    assert log(fine, run_of(tmp_path), range(1, 4)) == []
    assert fine.logged == [1, 2, 3]


def test_nothing_waits_for_a_logger_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, going, notes = threading.Event(), threading.Event(), list[str]()

    class Hangs(Odd):
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
            begun.set()
            going.wait(60)

    monkeypatch.setattr("rlkit.run.metrics_log.BACKLOG", 3)
    thread = LoggerThread(Hangs(), notes.append)
    thread.open(run_of(tmp_path))
    thread.log_metrics({}, 1)
    assert begun.wait(10)
    for step in range(2, 9):  # one hangs, three wait, and four find no place, as the end does not
        thread.log_metrics({}, step)
    thread.finalize("success", timeout=0.05)
    assert notes[0] == "warning: logger Hangs of tests has not ended after 0.05 s; the rest of its queue is lost"
    assert notes[1] == "warning: logger Hangs of tests failed 0 times and missed 5 steps"
    going.set()
