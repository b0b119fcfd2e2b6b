"""The actor on each node of a run: it starts the node's ranks, and ends them when it ends itself."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from rlkit_servers.process import exit_status, free_port, kill_supervised, start_supervised


class NodeInfo(NamedTuple):
    """What the launcher needs to know of a node."""

    host: str
    port: int
    python: str


class RankProcess:
    """A rank under its supervisor, which kills the rank's process group as soon as this process ends.

    Args:
        command: The rank's command.
        environment: Its environment variables.
        log: The file that gets its output.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._process = start_supervised(command, environment, log)

    def status(self) -> int | None:
        """Return the exit status, negative for the signal that ended the rank; None while it runs."""
        return exit_status(self._process)

    def signal(self, number: int) -> None:
        """Send a signal to the rank."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(bytes([number]))
            self._process.stdin.flush()

    def kill(self) -> None:
        """Kill the rank and its children, and wait until they have ended."""
        kill_supervised(self._process)


class NodeAgent:
    """Starts and watches the ranks of one node.

    Args:
        working_folder: The folder of the command, which the node must have too.
        out: The run folder, which all nodes share.
    """

    def __init__(self, working_folder: str, out: str) -> None:
        self._out = Path(out)
        self._ranks: dict[int, RankProcess] = {}
        self._lost_servers: dict[int, int | None] = {}
        self._problem = ""
        try:
            os.chdir(working_folder)
        except OSError as error:
            self._problem = f"it has no folder {working_folder}: {error.strerror}"

    def inspect(self, nonce: str) -> tuple[NodeInfo, str]:
        """Return the node's facts, and the reason why it cannot take part, if so; leave a file in the run folder."""
        try:
            if not self._problem:
                self._out.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder = self._out / "launcher"
                folder.mkdir(exist_ok=True)
                (folder / nonce).touch()
        except OSError as error:
            self._problem = f"it cannot write into {self._out}: {error.strerror}"
        import ray

        return NodeInfo(ray.util.get_node_ip_address(), free_port(), sys.executable), self._problem

    def missing(self, nonces: Sequence[str]) -> list[str]:
        """Return the files of other nodes that are not in this node's run folder."""
        return [nonce for nonce in nonces if not os.path.exists(self._out / "launcher" / nonce)]

    def start(self, command: Sequence[str], variables: Mapping[int, Mapping[str, str]]) -> None:
        """Start the ranks.

        Args:
            command: Of each rank.
            variables: The environment variables of each rank, by its number, beside those of this process.
        """
        for rank, values in variables.items():
            log = self.log(rank)
            log.unlink(missing_ok=True)
            self._ranks[rank] = RankProcess(command, {**os.environ, **values}, log)

    def statuses(self) -> dict[int, int | None]:
        """Return the exit status of each rank."""
        return {rank: process.status() for rank, process in self._ranks.items()}

    def note_lost_server(self, bundle: int, status: int | None) -> None:
        """Store the exit status of a vital server that a signal has ended; None for one that has died with its node."""
        self._lost_servers[bundle] = status

    def lost_servers(self) -> dict[int, int | None]:
        """Return the exit statuses of the vital servers that were lost, by the indices of their bundles."""
        return self._lost_servers

    def log(self, rank: int) -> Path:
        """Return the file with a rank's output."""
        return self._out / "launcher" / f"rank-{rank:05d}.log"

    def output(self, rank: int, offset: int) -> bytes:
        """Return a rank's output from an offset in bytes on."""
        try:
            with open(self.log(rank), "rb") as file:
                file.seek(offset)
                return file.read(1 << 20)
        except FileNotFoundError:
            return b""

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal to all ranks."""
        for process in self._ranks.values():
            process.signal(number)

    def kill(self) -> None:
        """Kill all ranks."""
        for process in self._ranks.values():
            process.kill()
