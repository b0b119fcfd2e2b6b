"""Launchers: where the processes of a run are started, if not by the command itself."""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from rlkit.interfaces.runtime import RunPart

LAUNCHED = "RLKIT_LAUNCHED"
"""The environment variable of ranks that a launcher has started."""


@dataclass(frozen=True)
class LaunchedRun:
    """A run to start: the same command on every rank.

    Args:
        words: The words after `rlkit fit`: recipes and options, without `--out`, `--resume` and `--force`. In place of
            credentials they have references to this process's environment, whose `RLKIT_` variables ranks need.
        out: The run folder, an absolute path on a file system that all nodes share.
        resume: The checkpoint to resume from; None for the newest one in `out`, if any.
        force: Whether to resume although the recipe has changed what is learned.
        nodes: Number of nodes (`fabric.num_nodes`).
        ranks_per_node: Processes on each node, with a device each (`fabric.devices`).
        on_gpus: Whether each rank has a GPU, rather than a CPU.
        servers: The GPUs of each rollout server that the first rank starts, on the nodes that `host_server` chooses; of
            each server without GPUs, 0.
        pools: The GPUs of each process of each pool of `placement:`, which the first rank starts likewise, before the
            rollout servers.
    """

    words: tuple[str, ...]
    out: Path
    resume: str | None
    force: bool
    nodes: int
    ranks_per_node: int
    on_gpus: bool
    servers: tuple[int, ...] = ()
    pools: tuple[tuple[int, ...], ...] = ()

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    def command(self, *, restarted: bool = False, python: str = sys.executable) -> list[str]:
        """Return the command of a rank, whose run goes on from the newest checkpoint in `out`, if there is one.

        Args:
            restarted: Whether the run has been started before; it then never goes back to `resume`.
            python: The interpreter.
        """
        resume = "auto" if self.resume is None or restarted else self.resume
        force = ["--force"] if self.force else []
        sizes = [f"--fabric.num_nodes={self.nodes}", f"--fabric.devices={self.ranks_per_node}"]
        return [python, "-m", "rlkit", "fit", *self.words, *sizes, f"--out={self.out}", f"--resume={resume}", *force]

    def variables(self, node: int, local_rank: int, host: str, port: int) -> Mapping[str, str]:
        """Return a rank's environment variables, which are those of torchrun.

        Args:
            node: Index of the node.
            local_rank: Index of the rank on its node.
            host: Address of the first node.
            port: A free port there.
        """
        return {
            LAUNCHED: "1",
            "RANK": str(node * self.ranks_per_node + local_rank),
            "LOCAL_RANK": str(local_rank),
            "GROUP_RANK": str(node),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.ranks_per_node),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_RUN_ID": "rlkit",
        }


class ServerSite(NamedTuple):
    """Where a server starts.

    Args:
        folder: A new folder on the server's node.
        host: The address at which the server listens.
        port: A port that is free there.
        python: The node's interpreter.
        first_gpu: The index of the server's first GPU; None without GPUs.
    """

    folder: Path
    host: str
    port: int
    python: str = sys.executable
    first_gpu: int | None = None


@dataclass(frozen=True)
class ServerCommand:
    """A server that rlkit starts, on this machine or on another.

    Args:
        product: The product's name, part of the name of the server's folder.
        words: Returns the command line at a site.
        write_files: Writes what the command reads into a folder, from where it is copied to the site.
        environment: Environment variables beside those of the node.
        gpus: Number of GPUs.
        first_gpu: The index of the first GPU if the server starts on this machine.
        log: The file that gets the output, in a folder that all nodes share; None for one in the server's folder.
        vital: Whether the run ends with the server; its launcher may then start the run again.
    """

    product: str
    words: Callable[[ServerSite], Sequence[str]]
    write_files: Callable[[Path], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    gpus: int = 0
    first_gpu: int | None = None
    log: Path | None = None
    vital: bool = False


class HostedServer(ABC):
    """The process of a server, on any machine."""

    url: str = ""
    """Its address, which a restart may change."""

    log: str = ""
    """Where its output is, for error messages."""

    @abstractmethod
    def start(self) -> None:
        """Start or restart the server; after a while it responds at `url`.

        Raises:
            EngineError: It cannot be started anywhere.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether the server is running, as far as is known; returns at once."""

    def exit_status(self) -> int | None:
        """Return the exit status of a server that has ended, negative for a signal; None if it is not known."""
        return None

    def is_lost(self) -> bool:
        """Whether the server has ended with its machine, so that `start` finds another one; may take a while."""
        return False

    @abstractmethod
    def tail(self) -> str:
        """Return the end of the server's output."""

    @abstractmethod
    def close(self) -> None:
        """Kill the server and all its children, and remove its folder."""


class Launcher(RunPart):
    """Starts the processes of `rlkit fit` on a cluster; none of them is started by the command itself.

    A launcher only places processes: tensors never pass through it, and ranks find each other as torchrun's do.
    """

    @abstractmethod
    def launch(self, run: LaunchedRun) -> int:
        """Start a run, wait for it or leave it to a queue, and return the exit status of the command.

        Raises:
            RecipeError: The cluster has too few nodes or devices; nothing has been started.
            LaunchError: The cluster cannot be reached, or a process could not be started.
        """

    def host_server(self, command: ServerCommand) -> HostedServer | None:
        """Return the process of a server on a node that the launcher chooses; None for the rank's own machine.

        The first rank calls this. The server is not started yet.
        """
        return None


def is_launched() -> bool:
    """Whether this process is a rank that a launcher has started."""
    return LAUNCHED in os.environ
