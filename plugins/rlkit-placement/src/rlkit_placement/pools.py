"""The pools of a run, as its ranks use them: processes of this machine, which end with the run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rlkit_servers.process import LONGEST_FOLDER, free_port, kill_supervised, server_environment, start_supervised
from torch import Tensor

from rlkit.base.errors import PoolError
from rlkit.batch import RolloutBatch
from rlkit.interfaces.placement import PlacedModel, PoolReply, Pools
from rlkit.recipe import Recipe
from rlkit_placement.checks import find_problems, number_of, refuse_pictures, visible_devices
from rlkit_placement.rows import divided, split_rows
from rlkit_placement.wire import ANY_TIME, TOGETHER, receive, send

if TYPE_CHECKING:
    from rlkit.distributed.ranks import Ranks

POLL_SECONDS = 0.2
EXIT_SECONDS = 5.0
"""How long the exit status of a process may take that has closed its connections."""


class Pool:
    """A pool as one rank of the trainer uses it.

    Args:
        name: Its name in `placement.pools`.
        recipe: With that pool.
        ranks: This rank among the others.
        run: The run folder.
        sockets: The folder of its sockets.
    """

    def __init__(self, name: str, recipe: Recipe, ranks: Ranks, run: Path, sockets: Path) -> None:
        assert recipe.placement is not None
        self.name = name
        self.roles = sorted(role for role, pool in recipe.placement.roles.items() if pool == name)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.logs = run / "pools"
        self.busy = 0.0
        self._recipe, self._ranks, self._run, self._sockets = recipe, ranks, run, sockets
        self._size = number_of(recipe.placement.pools[name].devices)
        self._deadline = recipe.train.deadline
        self._connections: dict[str, list[Connection]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, f"rlkit-pool-{name}")

    def __str__(self) -> str:
        return f"pool {self.name} ({', '.join(self.roles)})"

    def start(self) -> None:
        """Start its processes, as the first rank does."""
        self.logs.mkdir(exist_ok=True)
        environment = server_environment() | visible_devices(self._recipe, self.name)
        port = free_port() if self._size > 1 else 0
        clients = [self._ranks.count // self._size] * self._size if self._ranks.count > self._size else [1] * self._size
        for rank in range(self._size):
            words = [str(self._run.absolute()), self.name, str(clients[rank]), str(self._socket(rank))]
            group = _group(rank, self._size, port) if port else {}
            command = (sys.executable, "-m", "rlkit_placement", *words)
            log = self.log(rank)
            log.unlink(missing_ok=True)
            process = start_supervised(command, environment | group, log, folder=self._sockets)
            self.processes.append(process)

    def log(self, rank: int) -> Path:
        """Return the file of a process's output."""
        return self.logs / f"{self.name}-{rank}.log"

    def _socket(self, rank: int) -> Path:
        return self._sockets / f"{self.name}-{rank}"

    def await_ready(self) -> None:
        """Wait until its processes have loaded their models, as the first rank does.

        Raises:
            PoolError: One has ended, or does not within `train.deadline`.
        """
        end = time.monotonic() + self._deadline
        while not all(os.path.exists(self._socket(rank)) for rank in range(self._size)):
            problem = self.failure()
            if problem is not None:
                raise PoolError(problem)
            if time.monotonic() > end:
                raise PoolError(f"{self} has not loaded its models within train.deadline; its log is {self.log(0)}")
            time.sleep(POLL_SECONDS)

    def connect(self) -> None:
        """Connect this rank to its processes, which are ready."""
        own = [rank for rank in range(self._size) if rank % self._ranks.count == self._ranks.index % self._size]
        kinds = [TOGETHER] * (self.roles != ["reward"]) + [ANY_TIME] * ("reward" in self.roles)
        for kind in kinds:
            self._connections[kind] = [Client(str(self._socket(rank)), "AF_UNIX") for rank in own]
            for connection in self._connections[kind]:
                send(connection, {"kind": kind, "rank": self._ranks.index}, {})

    def begin(self, work: str, batch: RolloutBatch | None, options: Mapping[str, object]) -> Future[PoolReply]:
        """Begin a request that all ranks make in the same order."""
        count = len(self._connections[TOGETHER])
        parts: list[dict[str, Tensor]] = [{}] * count if batch is None else divided(batch, work, count)
        return self._thread.submit(self._ask, TOGETHER, work, parts, options)

    def score(self, inputs: Mapping[str, Tensor], options: Mapping[str, object]) -> Tensor:
        """Return the outputs [B] f32 of a reward model, or without inputs load it."""
        parts = split_rows(inputs, len(self._connections[ANY_TIME]))
        with self._lock:  # several rewards may be models
            reply = self._ask(ANY_TIME, "score", parts, options)
        return reply.tensors.get("outputs", torch.zeros(0))

    def _ask(
        self, kind: str, work: str, parts: Sequence[Mapping[str, Tensor]], options: Mapping[str, object]
    ) -> PoolReply:
        replies, connections = [], self._connections[kind]
        try:
            for connection, part in zip(connections, parts, strict=True):
                send(connection, {"work": work, "options": options}, part)
            replies = [receive(connection, self._deadline) for connection in connections]
        except TimeoutError as error:
            problem = f"{self} has not answered {work!r} within train.deadline, {self._deadline:g} s"
            raise PoolError(f"{problem}; its log is {self.log(0)}") from error
        except (EOFError, OSError) as error:
            raise PoolError(self._lost()) from error
        merged = PoolReply()
        for header, tensors in replies:
            if "error" in header:
                raise PoolError(f"{self} failed at {work!r}: {header['error']}; its log is {self.log(0)}")
            merged.tensors |= {
                n: torch.cat((merged.tensors[n], x)) if n in merged.tensors else x for n, x in tensors.items()
            }
            for name, (value, weight) in header["sums"].items():
                total = merged.sums.setdefault(name, [0.0, 0.0])
                merged.sums[name] = [total[0] + value, total[1] + weight]
            self.busy += header["busy"] / len(replies)
        return merged

    def failure(self) -> str | None:
        """Name a process that has ended; None if all run, or for a rank that has not started them."""
        for rank, process in enumerate(self.processes):
            status = process.poll()
            if status is not None:
                how = f"ended by {signal.Signals(256 - status).name}" if status > 128 else f"exit status {status}"
                return f"{self} has lost its process {rank}, {how}{self._error(rank)}; its log is {self.log(rank)}"
        return None

    def _error(self, rank: int) -> str:
        """Return the error with which a process has ended, after a colon; empty if its log has none."""
        lines = self.log(rank).read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        return f": {errors[-1]}" if errors else ""

    def _lost(self) -> str:
        end = time.monotonic() + EXIT_SECONDS
        while self.processes and time.monotonic() < end:
            problem = self.failure()
            if problem is not None:
                return problem
            time.sleep(POLL_SECONDS)
        return f"{self} has closed its connection; its log is {self.log(0)}"

    def close(self) -> None:
        """End its processes, on the rank that started them, and this rank's connections."""
        processes, self.processes = self.processes, []
        for process in processes:
            kill_supervised(process)
        for connection in (c for connections in self._connections.values() for c in connections):
            connection.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


def _group(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables of a process group, which are those of torchrun."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": 0, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    master = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "rlkit"}
    return {name: str(value) for name, value in (ranks | master).items()}


class LocalModel(PlacedModel):
    """A model of a pool on this machine.

    Args:
        pool: Connected.
        device: Of this rank.
        options: Added to those of each request.
    """

    def __init__(self, pool: Pool, device: torch.device, options: Mapping[str, object]) -> None:
        self._pool, self._device, self._options = pool, device, options

    def ask(self, work: str, batch: RolloutBatch | None = None, **options: object) -> Callable[[], PoolReply]:
        future = self._pool.begin(work, batch, {**self._options, **options})

        def wait() -> PoolReply:
            reply = future.result()
            if batch is not None:
                reply.tensors = {name: tensor.to(self._device) for name, tensor in reply.tensors.items()}
            return reply

        return wait


class LocalPools(Pools):
    """Pools of processes on this machine."""

    def __init__(self, recipe: Recipe, ranks: Ranks, folder: Path) -> None:
        assert recipe.placement is not None
        refuse_pictures(recipe)
        self._placement, self._ranks = recipe.placement, ranks
        self._sockets = Path(ranks.from_first(_private_folder))
        self._pools = {name: Pool(name, recipe, ranks, folder, self._sockets) for name in recipe.placement.pools}
        self._connected: set[str] = set()
        self._since = time.monotonic()
        try:
            ranks.on_first(self._start)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def problems(recipe: Recipe) -> Iterator[str]:
        return find_problems(recipe)

    def _start(self) -> None:
        for pool in self._pools.values():
            pool.start()

    def _pool(self, role: str) -> Pool | None:
        """Return the pool of a role, which is waited for when it is first asked for; all ranks must call this."""
        name = self._placement.roles.get(role)
        if name is None:  # agreed: from the recipe
            return None
        pool = self._pools[name]
        if name not in self._connected:  # agreed: all ranks ask for the same roles, in the same order
            self._ranks.on_first(pool.await_ready)
            pool.connect()
            self._connected.add(name)
        return pool

    def model(self, role: str, path: str | None = None) -> PlacedModel | None:
        pool = self._pool(role)
        options = {} if path is None else {"path": path}
        return None if pool is None else LocalModel(pool, self._ranks.fabric.device, options)

    def classifier(self, path: str, dtype: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        pool = self._pool("reward")
        if pool is None:
            return None
        score = partial(pool.score, options={"path": path, "dtype": dtype})
        score({})
        return score

    def failure(self) -> str | None:
        return next(filter(None, (pool.failure() for pool in self._pools.values())), None)

    def idle(self) -> dict[str, float]:
        now, shares = time.monotonic(), {}
        for name, pool in self._pools.items():
            shares[name] = max(0.0, 1 - pool.busy / max(now - self._since, 1e-9))
            pool.busy = 0.0
        self._since = now
        return shares

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        if self._ranks.fabric.is_global_zero:
            for path in self._sockets.glob("*"):
                path.unlink(missing_ok=True)
            if os.path.exists(self._sockets):
                self._sockets.rmdir()


def _private_folder() -> str:
    """Make a folder that no other user can enter, whose path is short enough for sockets."""
    long = len(tempfile.gettempdir()) > LONGEST_FOLDER
    return tempfile.mkdtemp(prefix="rlkit-pools-", dir="/tmp" if long else None)
