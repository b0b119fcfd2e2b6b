"""What a rank learns of another one that failed, was ended, or died without an error, and how it ends itself."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlkit.base.errors import RankError, RlkitError
from rlkit.run import peers as module
from rlkit.run.peers import Peers

KILLED = "it was killed, by SIGKILL or because the machine ran out of memory"
WATCHDOG = "NCCL's watchdog ended it, because a collective took longer than train.deadline"


@pytest.mark.parametrize(
    ("ended_by", "device", "started_here", "expected"),
    [
        (signal.SIGABRT, "cuda", True, f"error: {WATCHDOG}"),
        (signal.SIGABRT, "cpu", True, "error: it was ended by SIGABRT; its output may contain the reason"),
        (signal.SIGSEGV, "cuda", True, "error: it was ended by SIGSEGV; its output may contain the reason"),
        (signal.SIGKILL, "cuda", True, f"error: {KILLED}$"),
        (signal.SIGKILL, "cpu", False, f"error: {KILLED}$"),
        (signal.SIGABRT, "cuda", False, f"error: {KILLED}, or {WATCHDOG}"),
    ],
)
def test_what_ended_a_rank_is_named(
    ended_by: signal.Signals, device: str, started_here: bool, expected: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(("sleep", "100"))
    os.kill(process.pid, ended_by)
    process.wait(10)
    launcher = SimpleNamespace(procs=[process] if started_here else [])
    fabric: Any = SimpleNamespace(
        world_size=1, global_rank=0, device=torch.device(device), strategy=SimpleNamespace(launcher=launcher)
    )
    peers = Peers(fabric, tmp_path, lambda _: None)
    peers._processes = {0: {}, 1: {"pid": process.pid, "host": socket.gethostname()}}
    lost = peers._peer_failure()
    assert lost is not None
    assert lost.startswith(f"rank 1 (process {process.pid} on {socket.gethostname()}) died without an ")
    assert re.search(expected, lost)


HOST = socket.gethostname()


@pytest.fixture
def second(tmp_path: Path) -> Path:
    """The note of rank 1, which is alive: it has this process's id."""
    (tmp_path / "ranks").mkdir()
    return note(tmp_path / "ranks" / "1.json")


def note(path: Path, **ended: Any) -> Path:
    path.write_text(json.dumps({"pid": os.getpid(), "host": HOST, **ended}))
    return path


def first_of_two(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Peers:
    """Make what the first of two ranks has, without a thread that watches."""

    def raise_any(problem: RlkitError | None) -> None:
        if problem is not None:
            raise problem

    monkeypatch.setattr(module, "Ranks", lambda fabric: SimpleNamespace(raise_any=raise_any))
    monkeypatch.setattr(Peers, "_watch", lambda self, failure, patience: None)
    launcher = SimpleNamespace(launcher=SimpleNamespace(procs=[]))
    fabric: Any = SimpleNamespace(world_size=2, global_rank=0, device=torch.device("cpu"), strategy=launcher)
    return Peers(fabric, folder, lambda _: None)


def test_a_rank_writes_who_it_is_and_how_it_ended(
    tmp_path: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = first_of_two(tmp_path, monkeypatch)
    process_note = {"pid": os.getpid(), "host": HOST}
    for ended, noted in (
        ({}, {"done": True}),
        ({"error": ValueError("http://me:pw@host")}, {"error": "ValueError: http://***@host"}),
        ({"interrupted": "SIGTERM"}, {"interrupted": "SIGTERM"}),
    ):
        peers.record_end(**ended)  # type: ignore[arg-type]
        assert json.loads((tmp_path / "ranks" / "0.json").read_text()) == process_note | noted


@pytest.mark.parametrize(("ranks", "left"), [(2, {"0.json", "1.json"}), (1, set())])
def test_notes_of_an_attempt_with_more_ranks_are_removed(
    ranks: int, left: set[str], tmp_path: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (0, 2, 3):
        note(second.with_name(f"{rank}.json"), error="it died")
    if ranks == 2:
        first_of_two(tmp_path, monkeypatch)
    else:
        Peers(SimpleNamespace(world_size=1, global_rank=0), tmp_path, lambda _: None)  # type: ignore[arg-type]
    assert {path.name for path in second.parent.iterdir()} == left


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        ({}, None),
        ({"done": True}, None),
        ({"error": "ValueError: bad"}, "rank 1: ValueError: bad"),
        ({"error": "RankError: rank 0 is gone"}, None),  # it only learned of somebody else's
        ({"interrupted": "SIGINT"}, "rank 1 (process {process} on {host}) was ended at once by SIGINT"),
    ],
)
def test_a_failed_rank_is_lost_and_a_finished_one_is_not(
    ended: dict[str, Any], expected: str | None, tmp_path: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = first_of_two(tmp_path, monkeypatch)
    note(second, **ended)
    assert peers._peer_failure() == (expected and expected.format(process=os.getpid(), host=HOST))


def test_a_broken_collective_names_the_missing_rank(
    tmp_path: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peers = first_of_two(tmp_path, monkeypatch)
    broken, own = RuntimeError("[gloo] Connection closed by peer"), ValueError("my own")
    note(second, error="ValueError: bad")
    assert peers.explain(own) is own
    explained = peers.explain(broken)
    assert (type(explained), str(explained)) == (RankError, "rank 1: ValueError: bad")
    assert peers.explain(explained) is explained
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    note(second)
    assert re.fullmatch(
        "a rank did not reach its peers within train.deadline, .*: RuntimeError: .gloo. Connection closed by peer",
        str(peers.explain(broken)),
    )


def test_an_unwritable_folder_is_an_error_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ranks").write_text("a file")
    with pytest.raises(RankError, match="rank 0 cannot write into .*ranks: FileExistsError"):
        first_of_two(tmp_path, monkeypatch)


@pytest.mark.parametrize("released", [False, True])
def test_a_rank_that_outlives_a_peers_failure_writes_it(
    released: bool, tmp_path: Path, second: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Peers._watch
    peers = first_of_two(tmp_path, monkeypatch)
    lost: list[object] = []
    peers.on_loss = lost.append
    monkeypatch.setattr(peers, "leave", lost.append)
    note(second, error="ValueError: bad \x1b")
    if released:
        peers.release()
    watch(peers, peers._peer_failure, 0.0)
    assert lost == ([] if released else ["rank 1: ValueError: bad \x1b", 1])
    assert capsys.readouterr().err == ("" if released else "error: rank 1: ValueError: bad \\x1b\n")


def test_the_ranks_that_it_started_end_with_it(tmp_path: Path, second: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that has ended by itself is left alone, one that has not is killed."""
    peers = first_of_two(tmp_path, monkeypatch)
    monkeypatch.setattr(module, "PATIENCE", 0.0)
    ended, hangs = subprocess.Popen(("true",)), subprocess.Popen(("sleep", "100"))
    assert ended.wait(10) == 0
    peers.fabric.strategy.launcher.procs[:] = [ended, hangs]
    peers.end_children()
    assert (ended.returncode, hangs.wait(10)) == (0, -signal.SIGKILL)
