"""Trackers of other products, by their real packages, without a network."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from rlkit_trackers.loggers import ClearML, SwanLab

from rlkit.cli.main import main
from rlkit.interfaces.callback import LoggedRun, Logger
from rlkit.run.metrics_log import open_loggers
from tests.conftest import FAST, ROOT, read_jsonl

RUN = {"train": {"lr": 0.5}, "task": {"class_path": "Arithmetic"}}


def log(logger: Logger, folder: Path, steps: range) -> list[str]:
    notes: list[str] = []
    [thread] = open_loggers([logger], LoggedRun(folder, "abc", RUN, steps.start - 1), notes.append)
    for step in steps:
        thread.log_metrics({"reward/mean": step / 4, "time/sample": 1.0}, step)
    thread.finalize("success", timeout=120.0)
    return notes


def test_trackio_continues_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It begins after step 2, and makes step 3 again."""
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path / "trackio")
    monkeypatch.chdir(tmp_path)
    options = (*FAST, "--train.steps=3", "--validation=null", "--save={every: 1, keep_last: 3}", "--out=out")
    command = ["fit", "--recipe=quickstart", *options, "--log.loggers=[{class_path: Trackio, init_args: {project: p}}]"]
    assert main(command) == 0
    shutil.rmtree("out/checkpoints/step-000003")
    assert main([*command, "--resume=auto"]) == 0
    [database] = Path("trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select run_id, run_name, step, metrics from metrics order by id").fetchall()
        [config] = connection.execute("select config from configs").fetchall()
    run_id = json.loads(Path("out/environment.json").read_text())["run_id"]
    assert {row[:2] for row in rows} == {(rows[0][0], f"out-{run_id}")}
    assert [row[2] for row in rows] == [1, 2, 3, 3]
    reward = [json.loads(row[3])["reward/mean"] for row in rows]
    expected = [row["reward/mean"] for row in read_jsonl(Path("out/metrics.jsonl"))]
    assert reward == pytest.approx([*expected, expected[2]])
    assert json.loads(config[0])["train"]["steps"] == 3


def test_swanlab_writes_to_the_run_folder(tmp_path: Path) -> None:
    assert log(SwanLab(offline=True), tmp_path, range(1, 3)) == []
    assert log(SwanLab(offline=True), tmp_path, range(3, 4)) == []
    runs = sorted((tmp_path / "swanlab").glob("run-*"))
    assert [run.name.rpartition("-")[2] for run in runs] == ["abc", "abc"]
    contents = [(run / "run-abc.swanlab").read_bytes() for run in runs]
    assert all(b"reward/mean" in content and b"time/sample" in content for content in contents)
    assert "Arithmetic" in (runs[0] / "files" / "config.yaml").read_text()


def test_trackers_do_not_store_credentials_of_the_command(tmp_path: Path) -> None:
    """SwanLab reads the command line from the kernel, ClearML from a thread of its own."""
    code = (
        "from pathlib import Path\nfrom rlkit_trackers.loggers import *\nfrom tests.hubs.test_trackers import log\n"
        "for logger in (SwanLab(offline=True), ClearML('adds', 'sums', offline=True)):\n"
        f"    log(logger, Path({str(tmp_path)!r}), range(1, 2))"
    )
    environment = {**os.environ, "CLEARML_CACHE_DIR": str(tmp_path / "cache"), "HOME": str(tmp_path)}
    subprocess.run((sys.executable, "-c", code, "--url=http://me:hunter2@h"), cwd=ROOT, env=environment, check=True)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"swanlab", "cache"} <= {path.relative_to(tmp_path).parts[0] for path in files}
    assert not [path for path in files if b"hunter2" in path.read_bytes()]


def test_clearml_writes_a_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From threads of this process: a fork of it, while another thread of ClearML's starts git, could hang for ever."""
    monkeypatch.delattr("os.fork")
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    assert log(ClearML("adds", "sums", offline=True), tmp_path, range(1, 4)) == []
    [session] = tmp_path.rglob("offline/*/metrics.jsonl")
    points = [point for line in session.read_text().splitlines() for point in json.loads(line)]
    rewards = [(p["iter"], p["value"]) for p in points if (p["metric"], p["variant"]) == ("reward", "mean")]
    assert sorted(rewards) == [(1, 0.25), (2, 0.5), (3, 0.75)]
    task = json.loads((session.parent / "task.json").read_text())
    assert (task["name"], task["project_name"]) == ("sums", "adds")
    assert "Arithmetic" in json.dumps(task["configuration"]["recipe"])
    assert not (tmp_path / "clearml-task").exists()


def test_clearml_continues_the_task_of_a_resumed_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its server is recorded only: `Task.init` is asked for a new task, then for the same one, counted from 0."""
    asked: list[tuple[bool | str, bool]] = []
    offsets: list[int] = []

    class Task:
        id = "t1"

        def set_initial_iteration(self, offset: int) -> None:
            offsets.append(offset)

        def connect_configuration(self, configuration: object, name: str) -> None:
            assert (configuration, name) == (RUN, "recipe")

        @classmethod
        def set_offline(cls, offline: bool) -> None:
            assert not offline

        @classmethod
        def init(cls, *names: str, continue_last_task: bool | str, reuse_last_task_id: bool, **watched: bool) -> Task:
            assert names == ("rlkit", tmp_path.name)
            assert not any(watched.values())
            asked.append((continue_last_task, reuse_last_task_id))
            return cls()

    monkeypatch.setattr("clearml.Task", Task)
    for _ in range(2):
        ClearML().start(LoggedRun(tmp_path, "abc", RUN, 0))
    assert (asked, offsets) == ([(False, False), ("t1", False)], [0])
