"""The end of a run when one of its ranks fails: the others end too, and name it with the cause."""

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

from rlkit.distributed.ranks import Ranks
from rlkit.errors import RankError, explain
from rlkit.run.folder import write_whole
from rlkit.text import redact, safe
from rlkit.types import JsonObject

COLLECTIVE = re.compile(r"gloo|nccl|processgroup|tcpstore|connection (closed|reset)|\bc10d\b", re.IGNORECASE)
"""Texts in errors of collectives that mean a missing rank."""

PATIENCE = 15.0
"""Seconds in which a rank may end by itself and write its error, once another has failed."""


class Peers:
    """The ranks of a run, each of which writes its process id, and later how it ended, into the run folder.

    Args:
        fabric: Launched; every rank must create this.
        folder: The run folder, on a file system that all ranks share.
        on_loss: Called in a thread of its own with what happened, if this rank outlives another's death by
            `PATIENCE` seconds; the process ends after it.
    """

    def __init__(self, fabric: Fabric, folder: Path, on_loss: Callable[[str], None]) -> None:
        self.fabric = fabric
        self.folder = folder / "ranks"
        self.on_loss = on_loss
        self._released = False
        self._mine = {"pid": os.getpid(), "host": socket.gethostname()}
        if fabric.world_size == 1:
            return
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # it would kill this process without a message
                thread._child_processes = []  # type: ignore[attr-defined]
        problem = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._note({})
        except OSError as error:
            problem = RankError(f"rank {fabric.global_rank} cannot write into {self.folder}: {explain(error)}")
        Ranks(fabric).raise_any(problem)
        self._known = {rank: self._read(rank) for rank in range(fabric.world_size)}
        threading.Thread(target=self._watch, daemon=True, name="rlkit-peers").start()

    def done(self, error: Exception | None = None, interrupted: str | None = None) -> None:
        """Write how this rank ended: well, with an error, or at once by a signal of that name."""
        if self.fabric.world_size == 1:
            return
        note: JsonObject = {"done": True} if error is None else {"error": redact(explain(error))}
        try:
            self._note(note if interrupted is None else {"interrupted": interrupted})
        except OSError as problem:  # a full disk: the others will see that this process is gone
            print(f"warning: {safe(explain(problem))}", file=sys.stderr)

    def release(self) -> None:
        """Stop watching the others: this rank ends by itself, and waits for none of them."""
        self._released = True

    def explain(self, error: Exception) -> Exception:
        """Return the error itself or, if it only means that another rank is missing, one with the cause."""
        if self.fabric.world_size == 1 or isinstance(error, RankError) or not COLLECTIVE.search(str(error)):
            return error
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if lost := self._lost():
                return RankError(lost)
            time.sleep(0.2)
        text = redact(explain(error))
        return RankError(f"a rank did not reach the others within train.deadline, or cannot be reached: {text}")

    def leave(self, code: int) -> None:
        """Exit now, after the processes that this one started, without cleanup that waits for other ranks."""
        self.end_children()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)

    def end_children(self) -> None:
        """After a failure, end the ranks that this process started and that have not ended by themselves."""
        launcher = self.fabric.strategy.launcher
        deadline = time.monotonic() + PATIENCE
        for process in getattr(launcher, "procs", ()):
            while process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.1)
            if process.poll() is None:
                process.kill()

    def _note(self, more: JsonObject) -> None:
        write_whole(self.folder / f"{self.fabric.global_rank}.json", json.dumps(self._mine | more).encode())

    def _read(self, rank: int) -> JsonObject:
        try:
            note: JsonObject = json.loads((self.folder / f"{rank}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return note

    def _lost(self) -> str | None:
        """Return which other rank has failed; one that recorded an error comes before one that only died."""
        others = [rank for rank in self._known if rank != self.fabric.global_rank]
        notes = {rank: self._read(rank) for rank in others}
        own = [f"rank {r}: {n['error']}" for r, n in notes.items() if "error" in n and "RankError" not in n["error"]]
        if own:
            return "; ".join(own)
        for rank in others:
            pid, host = self._known[rank]["pid"], self._known[rank]["host"]
            if "interrupted" in notes[rank]:
                return f"rank {rank} (process {pid} on {host}) was ended at once by {notes[rank]['interrupted']}"
            if not notes[rank].keys() & {"done", "error"} and host == self._mine["host"] and not _alive(pid):
                return f"rank {rank} (process {pid} on {host}) died without an error: {self._cause(pid)}"
        return None

    def _cause(self, pid: int) -> str:
        """Return what ended a process, from its exit status, which only the process that started it can read."""
        launcher = self.fabric.strategy.launcher
        ends = {process.pid: process.poll() for process in getattr(launcher, "procs", ())}
        watchdog = "NCCL's watchdog ended it, since a collective took longer than train.deadline (its output names it)"
        killed = "it was killed, by SIGKILL or because the machine ran out of memory"
        gpus, code = self.fabric.device.type == "cuda", ends.get(pid)
        if code == -signal.SIGABRT and gpus:
            return watchdog
        if code is not None and code < 0 and code != -signal.SIGKILL:
            return f"it was ended by {signal.Signals(-code).name}; its output may have the reason"
        return f"{killed}, or {watchdog}" if gpus and code is None else killed

    def _watch(self) -> None:
        while (lost := self._lost()) is None:
            time.sleep(1.0)
        time.sleep(PATIENCE)  # a rank that can end in order does so meanwhile
        if not self._released:
            self.on_loss(lost)
            print(f"error: {safe(lost)}", file=sys.stderr)
            self.leave(1)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:  # another user's process, or a system without /proc
        return True
