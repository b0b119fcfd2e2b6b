"""Starting the processes of a run, and which folder it runs in."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlkit.base.files import MANIFEST
from rlkit.commands import parse
from rlkit.records.folder import home_of
from rlkit.run import launch
from rlkit.run.launch import LAUNCHER, Job


def test_a_rank_exits_if_its_launcher_ends_before_all_join(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    joined = threading.Event()
    threading.Timer(0.05, joined.set).start()
    launch._exit_without_launcher(str(os.getppid()), joined)
    assert codes == []
    launch._exit_without_launcher(str(os.getpid()), threading.Event())  # another process has adopted it
    assert codes == [1]
    assert capsys.readouterr().err == f"error: process {os.getpid()}, which started this rank, has ended\n"
    launch._exit_without_launcher("not a number", threading.Event())
    assert codes == [1, 1]


@pytest.mark.parametrize("rank", ["0", "1"])
def test_ranks_that_are_started_know_who_starts_them(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rank tells the others by the environment; what these start is none of its ranks."""
    launchers: list[Any] = []
    watched = threading.Event()
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.setattr(launch, "_exit_without_launcher", lambda *args: (launchers.append(args[0]), watched.set()))
    if rank == "1":
        monkeypatch.setenv(LAUNCHER, "12345")
    fabric: Any = SimpleNamespace(launch=lambda: launchers.append(os.environ[LAUNCHER]))
    launch._start_ranks(fabric)
    assert LAUNCHER not in os.environ
    if rank == "0":
        assert launchers == [str(os.getpid())]
        assert not watched.is_set()
    else:
        assert watched.wait(10)
        assert launchers == ["12345", "12345"]


def test_a_run_resumes_where_its_checkpoint_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-000001"
    checkpoint.mkdir(parents=True)
    for folder in (run, checkpoint):
        (folder / "recipe.yaml").touch()
    (checkpoint / MANIFEST).touch()  # what a checkpoint itself holds is no recipe
    assert home_of(str(checkpoint)) == home_of(str(checkpoint.parent)) == home_of(str(run)) == run
    assert home_of(str(checkpoint / "a" / "b")) is None
    parsed = parse("fit", ["--recipe=quickstart"])

    def folder(**options: Any) -> Path:
        return Job(parsed.recipe, parsed.yaml, parsed.registry, "name", **options).folder

    assert folder(resume=str(checkpoint)) == run
    assert folder(resume=str(checkpoint), out="other") == folder(resume="auto", out="other") == Path("other")
    new = folder()
    assert new.parent == Path("runs")
    assert new.name.startswith("name-")
    new.mkdir(parents=True)
    again = folder()  # within the same second it gets a number
    assert again != new
    assert not again.exists()
