"""What a rank says of another one that died without a word."""

from __future__ import annotations

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

from rlkit.run.peers import Peers

KILLED = "it was killed, by SIGKILL or because the machine ran out of memory"
WATCHDOG = "NCCL's watchdog ended it, since a collective took longer than train.deadline"


@pytest.mark.parametrize(
    ("ended_by", "device", "started_here", "said"),
    [
        (signal.SIGABRT, "cuda", True, f"error: {WATCHDOG}"),
        (signal.SIGABRT, "cpu", True, "error: it was ended by SIGABRT; its output may say why"),
        (signal.SIGSEGV, "cuda", True, "error: it was ended by SIGSEGV; its output may say why"),
        (signal.SIGKILL, "cuda", True, f"error: {KILLED}$"),
        (signal.SIGKILL, "cpu", False, f"error: {KILLED}$"),
        (signal.SIGABRT, "cuda", False, f"error: {KILLED}, or {WATCHDOG}"),
    ],
)
def test_what_ended_a_rank_is_named(
    ended_by: signal.Signals, device: str, started_here: bool, said: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(("sleep", "100"))
    os.kill(process.pid, ended_by)
    process.wait(10)
    launcher = SimpleNamespace(procs=[process] if started_here else [])
    fabric: Any = SimpleNamespace(
        world_size=1, global_rank=0, device=torch.device(device), strategy=SimpleNamespace(launcher=launcher)
    )
    peers = Peers(fabric, tmp_path, lambda _: None)
    peers._known = {0: {}, 1: {"pid": process.pid, "host": socket.gethostname()}}
    lost = peers._lost()
    assert lost is not None
    assert lost.startswith(f"rank 1 (process {process.pid} on {socket.gethostname()}) died without an ")
    assert re.search(said, lost)
