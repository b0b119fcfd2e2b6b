"""The end of a run when one of its ranks fails: all other ranks end too, and report which rank failed and why."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from lightning.fabric import Fabric

from rlkit.base.errors import RankError, explain
from rlkit.base.files import MAX_JSON_BYTES, read_inside
from rlkit.base.text import redact, safe
from rlkit.distributed.ranks import Ranks
from rlkit.records.folder import write_atomically
from rlkit.types import JsonObject

COLLECTIVE = re.compile(r"gloo|nccl|processgroup|tcpstore|connection (closed|reset)|\bc10d\b", re.IGNORECASE)
"""Matches errors of collectives that mean a missing rank."""

PATIENCE = 15.0
"""Seconds in which a rank may end by itself and record its error after another rank failed."""


class Peers:
    """The ranks of a run; each writes its process id, and later how it ended, to the run folder.

    Args:
        fabric: A launched Fabric; every rank must create this object.
        folder: The run folder, on a file system that all ranks share.
        on_loss: Called in a separate thread with a description, if this rank is still running `PATIENCE` seconds after
            another rank failed; the process exits afterwards.
    """

    def __init__(self, fabric: Fabric, folder: Path, on_loss: Callable[[str], None]) -> None:
        self.fabric = fabric
        self.folder = folder / "ranks"
        self.on_loss = on_loss
        self._released = False
        self._process = {"pid": os.getpid(), "host": socket.gethostname()}
        if fabric.global_rank == 0:
            self._remove_notes_of_more_ranks()
        if fabric.world_size == 1:
            return
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # it would kill this process without a message
                thread._child_processes = []  # type: ignore[attr-defined]
        problem = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write({})
        except OSError as error:
            problem = RankError(f"rank {fabric.global_rank} cannot write into {self.folder}: {explain(error)}")
        Ranks(fabric).raise_any(problem)
        self._processes = {rank: self._read(rank) for rank in range(fabric.world_size)}
        self.watch(self._peer_failure)

    def watch(self, failure: Callable[[], str | None], patience: float = PATIENCE) -> None:
        """End this rank if it is still running so many seconds after `failure` has returned a description."""
        threading.Thread(target=self._watch, args=(failure, patience), daemon=True, name="rlkit-peers").start()

    def record_end(self, error: Exception | None = None, interrupted: str | None = None) -> None:
        """Record how this rank ended: normally, with an error, or at once by a signal of that name."""
        if self.fabric.world_size == 1:
            return
        note: JsonObject = {"done": True} if error is None else {"error": redact(explain(error))}
        try:
            self._write(note if interrupted is None else {"interrupted": interrupted})
        except OSError as problem:  # a full disk: the other ranks will see that this process is gone
            print(f"warning: {safe(explain(problem))}", file=sys.stderr)

    def release(self) -> None:
        """Stop watching the other ranks: this rank ends without waiting for them."""
        self._released = True

    def explain(self, error: Exception) -> Exception:
        """Return the error itself or, if it only means that another rank is missing, an error with the cause."""
        if self.fabric.world_size == 1 or isinstance(error, RankError) or not COLLECTIVE.search(str(error)):
            return error
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            problem = self._peer_failure()
            if problem is not None:
                return RankError(problem)
            time.sleep(0.2)
        text = redact(explain(error))
        return RankError(f"a rank did not reach its peers within train.deadline, or cannot be reached: {text}")

    def leave(self, code: int) -> None:
        """End child processes and exit now, without cleanup that waits for other ranks."""
        self.end_children()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def end_children(self) -> None:
        """End the ranks that this process started and that do not end by themselves after a failure."""
        launcher = self.fabric.strategy.launcher
        deadline = time.monotonic() + PATIENCE
        for process in getattr(launcher, "procs", ()):
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if process.poll() is None:
                process.kill()

    def _remove_notes_of_more_ranks(self) -> None:
        """Remove what ranks wrote that an earlier attempt had, and this one has not; a single rank writes nothing."""
        count = self.fabric.world_size if self.fabric.world_size > 1 else 0
        for path in self.folder.glob("*.json"):
            if path.stem.isdecimal() and int(path.stem) >= count:
                path.unlink(missing_ok=True)

    def _write(self, fields: JsonObject) -> None:
        write_atomically(self.folder / f"{self.fabric.global_rank}.json", json.dumps(self._process | fields).encode())

    def _read(self, rank: int) -> JsonObject:
        try:
            note: JsonObject = json.loads(read_inside(self.folder, f"{rank}.json", MAX_JSON_BYTES))
        except (OSError, ValueError):
            return {}
        return note

    def _peer_failure(self) -> str | None:
        """Return the failure of another rank; recorded errors come before ranks that only died."""
        peers = [rank for rank in self._processes if rank != self.fabric.global_rank]
        notes = {rank: self._read(rank) for rank in peers}
        errors = [f"rank {r}: {n['error']}" for r, n in notes.items() if "error" in n and "RankError" not in n["error"]]
        if errors:
            return "; ".join(errors)
        for rank in peers:
            process = self._processes[rank]
            pid, host = process["pid"], process["host"]
            if "interrupted" in notes[rank]:
                return f"rank {rank} (process {pid} on {host}) was ended at once by {notes[rank]['interrupted']}"
            if not notes[rank].keys() & {"done", "error"} and host == self._process["host"] and not _alive(pid):
                return f"rank {rank} (process {pid} on {host}) died without an error: {self._cause(pid)}"
        return None

    def _cause(self, pid: int) -> str:
        """Describe the end of a process by its exit status, which only the process that started it can read."""
        launcher = self.fabric.strategy.launcher
        exit_codes = {process.pid: process.poll() for process in getattr(launcher, "procs", ())}
        watchdog = "NCCL's watchdog ended it, because a collective took longer than train.deadline (its log names it)"
        killed = "it was killed, by SIGKILL or because the machine ran out of memory"
        code = exit_codes.get(pid)
        on_gpu = self.fabric.device.type == "cuda"
        if code == -signal.SIGABRT and on_gpu:
            return watchdog
        if code is not None and code < 0 and code != -signal.SIGKILL:
            return f"it was ended by {signal.Signals(-code).name}; its output may contain the reason"
        return f"{killed}, or {watchdog}" if on_gpu and code is None else killed

    def _watch(self, failure: Callable[[], str | None], patience: float) -> None:
        problem = failure()
        while problem is None:
            time.sleep(1.0)
            problem = failure()
        time.sleep(patience)  # a rank that can end in order does so meanwhile
        if not self._released:
            self.on_loss(problem)
            print(f"error: {safe(problem)}", file=sys.stderr)
            self.leave(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without /proc
        return True
