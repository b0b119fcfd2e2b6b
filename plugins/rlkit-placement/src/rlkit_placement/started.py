"""A process of a pool as the first rank starts it: where the run's launcher places it, or else on this machine."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlkit_servers.process import LOCAL_HOST, ServerProcess, server_environment

from rlkit.distributed.sender_group import rendezvous_store
from rlkit.interfaces.launcher import Launcher, ServerCommand, ServerSite
from rlkit.registry import calling
from rlkit_placement.handshake import connected

PASSED_ON = ("GLOO_", "HF_", "NCCL_", "OMP_", "PYTHONPATH", "RLKIT_DISABLE_PLUGINS", "TORCH_")
"""Beginnings of the environment variables of the first rank that a process on another node gets too."""

LONGEST_PATH = 100
"""Characters of a Unix socket's path, for which systems have 104 or more."""


class ProcessGroup:
    """The process group of a pool, whose store this process has.

    Args:
        size: Number of processes.
        is_placed: Whether each may be on a node of its own.
    """

    def __init__(self, size: int, is_placed: bool) -> None:
        self._size, self._is_placed = size, is_placed
        self._host = os.environ["MASTER_ADDR"] if is_placed else LOCAL_HOST
        self._store = rendezvous_store(self._host)

    def variables(self, rank: int) -> dict[str, str]:
        """Return the environment variables of a process, which are those of torchrun."""
        node, local_rank, local_size = (rank, 0, 1) if self._is_placed else (0, rank, self._size)
        ranks = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "WORLD_SIZE": self._size}
        store = {"MASTER_ADDR": self._host, "MASTER_PORT": self._store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
        launch = {"LOCAL_WORLD_SIZE": local_size, "TORCHELASTIC_RUN_ID": "rlkit"}
        return {name: str(value) for name, value in (ranks | store | launch).items()}


class PoolProcess:
    """A process of a pool.

    Args:
        arguments: Those of `rlkit_placement.process`, without the address.
        variables: Environment variables.
        log: The file of its output.
        gpus: How many it has if a launcher places it.
        launcher: The launcher that has started this rank, if any.
    """

    address = ""
    """Where it listens; known once it is started."""

    def __init__(
        self,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        log: Path,
        gpus: int,
        launcher: Launcher | None,
    ) -> None:
        self._arguments = arguments
        self._end: str | None = None
        self._lock = threading.Lock()  # several threads ask for the end
        passed_on = {name: value for name, value in server_environment().items() if name.startswith(PASSED_ON)}
        command = ServerCommand(
            "pool", self._words, lambda _: None, {**passed_on, **variables}, gpus, log=log.absolute(), vital=True
        )
        hosted = None
        if launcher is not None:
            with calling(launcher, "host_server"):
                hosted = launcher.host_server(command)
        self._is_here = hosted is None
        self._process = hosted or ServerProcess(command)

    def _words(self, site: ServerSite) -> list[str]:
        path = str(site.folder / "socket")
        self.address = path if self._is_here and len(path) <= LONGEST_PATH else f"{site.host}:{site.port}"
        return [site.python, "-m", "rlkit_placement", *self._arguments, self.address]

    def start(self) -> None:
        """Start it.

        Raises:
            EngineError: The launcher cannot.
        """
        self._process.start()

    def listens(self) -> bool:
        """Check whether it has loaded its models."""
        try:
            connected(self.address).close()
        except OSError:
            return False
        return True

    def end(self) -> str | None:
        """Describe how it has ended, with its last error; None if it runs."""
        with self._lock:
            if self._end is None and not self._process.alive:
                status = self._process.exit_status()
                self._end = "whose node does not answer" if status is None else self._explain(status)
                if status is not None:
                    self._process.close()  # with its folder: this rank may soon exit at once
            return self._end

    def _explain(self, status: int) -> str:
        errors = [line for line in self._process.tail().splitlines() if line.startswith("error: ")]
        how = f"ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        return how + "".join(f": {error.removeprefix('error: ')}" for error in errors[-1:])

    def close(self) -> None:
        """Kill it."""
        self._process.close()
