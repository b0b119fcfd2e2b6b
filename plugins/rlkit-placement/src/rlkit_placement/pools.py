"""The pools of a run, as its ranks use them: processes that the first rank starts, and that end with the run."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rlkit.base.errors import PoolError
from rlkit.interfaces.launcher import is_launched
from rlkit.interfaces.placement import PlacedModel, PoolReply, Pools
from rlkit.recipe import Recipe
from rlkit.types import RolloutBatch
from rlkit_placement.checks import find_problems, number_of, refuse_pictures, visible_devices
from rlkit_placement.handshake import connect_client
from rlkit_placement.rows import divided, split_rows
from rlkit_placement.started import PoolProcess, ProcessGroup
from rlkit_placement.wire import ANY_TIME, KEY, TOGETHER, receive, send

if TYPE_CHECKING:
    from rlkit.distributed.ranks import Ranks

POLL_SECONDS = 0.2
EXIT_SECONDS = 45.0
"""How long the end of a process may take to be known that has closed its connections; Ray looks for its node first."""


class Pool:
    """A pool as one rank of the trainer uses it.

    Args:
        name: Its name in `placement.pools`.
        recipe: With that pool.
        ranks: This rank among the others.
        run: The run folder.
    """

    def __init__(self, name: str, recipe: Recipe, ranks: Ranks, run: Path) -> None:
        assert recipe.placement is not None
        self.name = name
        self.roles = sorted(recipe.placement.roles_of(name))
        self.processes: list[PoolProcess] = []
        self.logs = run / "pools"
        self.busy = 0.0
        self.lost: str | None = None
        self._recipe, self._ranks, self._run = recipe, ranks, run
        self._size = number_of(recipe.placement.pools[name].devices)
        self._gpus = int(recipe.placement.pools[name].accelerator != "cpu")
        self._group: ProcessGroup | None = None  # its store is open as long as this object is
        self._deadline = recipe.train.deadline
        self._connections: dict[str, list[Connection]] = {}
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, f"rlkit-pool-{name}")

    def __str__(self) -> str:
        return f"pool {self.name} ({', '.join(self.roles)})"

    def start(self, key: bytes) -> list[str]:
        """Start its processes, as the first rank does; return their addresses.

        Raises:
            EngineError: The launcher cannot start one.
        """
        self.logs.mkdir(exist_ok=True)
        launcher = self._recipe.launcher if is_launched() else None
        self._group = ProcessGroup(self._size, launcher is not None) if self._size > 1 else None
        own_gpus = {} if launcher is not None else visible_devices(self._recipe, self.name)
        clients = max(self._ranks.count // self._size, 1)
        words = (str(self._run.absolute()), self.name, str(clients), os.getcwd())
        for rank in range(self._size):
            self.log(rank).unlink(missing_ok=True)
            variables = {} if self._group is None else self._group.variables(rank)
            process = PoolProcess(
                words, {**own_gpus, **variables, KEY: key.hex()}, self.log(rank), self._gpus, launcher
            )
            self.processes.append(process)
            process.start()
        return [process.address for process in self.processes]

    def log(self, rank: int) -> Path:
        """Return the file of a process's output."""
        return self.logs / f"{self.name}-{rank}.log"

    def await_ready(self) -> None:
        """Wait until its processes have loaded their models, as the first rank does.

        Raises:
            PoolError: One has ended, or does not within `train.deadline`.
        """
        end = time.monotonic() + self._deadline
        while not all(process.listens() for process in self.processes):
            problem = self.failure()
            if problem is not None:
                raise PoolError(problem)
            if time.monotonic() > end:
                raise PoolError(f"{self} has not loaded its models within train.deadline; its log is {self.log(0)}")
            time.sleep(POLL_SECONDS)

    def connect(self, addresses: Sequence[str], key: bytes) -> None:
        """Connect this rank to its processes, which are ready.

        Raises:
            PoolError: One does not answer, or has another key.
        """
        own = [rank for rank in range(self._size) if rank % self._ranks.count == self._ranks.index % self._size]
        kinds = [TOGETHER] * (self.roles != ["reward"]) + [ANY_TIME] * ("reward" in self.roles)
        for kind in kinds:
            header = {"kind": kind, "rank": self._ranks.index}
            try:
                connections = [connect_client(addresses[rank], key, header, self._deadline) for rank in own]
            except OSError as error:
                raise PoolError(f"{self} cannot be reached from {socket.gethostname()}: {error}") from error
            self._connections[kind] = connections

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
        except (TimeoutError, BlockingIOError) as error:
            problem = f"{self} has not answered {work!r} within train.deadline, {self._deadline:g} s"
            raise PoolError(f"{problem}; its log is {self.log(0)}") from error
        except (EOFError, OSError) as error:
            self.lost = self._lost()
            raise PoolError(self.lost) from error
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
            end = process.end()
            if end is not None:
                return f"{self} has lost its process {rank}, {end}; its log is {self.log(rank)}"
        return None

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
            process.close()
        for connection in (c for connections in self._connections.values() for c in connections):
            connection.close()
        self._thread.shutdown(wait=False, cancel_futures=True)


class PooledModel(PlacedModel):
    """A model of a pool.

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


class StartedPools(Pools):
    """Pools whose processes the first rank starts: where the run's launcher places them, or on this machine."""

    def __init__(self, recipe: Recipe, ranks: Ranks, folder: Path) -> None:
        assert recipe.placement is not None
        refuse_pictures(recipe)
        self._placement, self._ranks = recipe.placement, ranks
        self._pools = {name: Pool(name, recipe, ranks, folder) for name in recipe.placement.pools}
        self._connected: set[str] = set()
        self._since = time.monotonic()
        try:
            self._key, self._addresses = ranks.from_first(self._start)
        except BaseException:
            self.close()
            raise

    @staticmethod
    def problems(recipe: Recipe) -> Iterator[str]:
        return find_problems(recipe)

    def _start(self) -> tuple[bytes, dict[str, list[str]]]:
        """Start the processes; return the run's key, and the addresses of each pool's processes."""
        key = secrets.token_bytes(32)
        return key, {name: pool.start(key) for name, pool in self._pools.items()}

    def _pool(self, role: str) -> Pool | None:
        """Return the pool of a role, which is waited for when it is first asked for; all ranks must call this."""
        name = self._placement.roles.get(role)
        if name is None:  # agreed: from the recipe
            return None
        pool = self._pools[name]
        if name not in self._connected:  # agreed: all ranks ask for the same roles, in the same order
            self._ranks.on_first(pool.await_ready)
            pool.connect(self._addresses[name], self._key)
            self._connected.add(name)
        return pool

    def model(self, role: str, path: str | None = None) -> PlacedModel | None:
        pool = self._pool(role)
        options = {} if path is None else {"path": path}
        return None if pool is None else PooledModel(pool, self._ranks.fabric.device, options)

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
        lost = [pool.lost for pool in self._pools.values() if pool.lost is not None]
        if lost:  # agreed: a rank that fails ends all; a reward's failure alone would only leave out its samples
            raise PoolError(lost[0])
        now, shares = time.monotonic(), {}
        for name, pool in self._pools.items():
            shares[name] = max(0.0, 1 - pool.busy / max(now - self._since, 1e-9))
            pool.busy = 0.0
        self._since = now
        return shares

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
