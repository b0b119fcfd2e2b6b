"""Rollouts from SGLang: servers, or an engine on each rank's own device."""

from __future__ import annotations

import socket
import warnings
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from rlkit.engines.server.api import ServerApi
from rlkit.engines.server.engine import ServerEngine
from rlkit.engines.server.http import Client
from rlkit.engines.server.node import Node
from rlkit.engines.server.process import ServerProcess, write_model
from rlkit.engines.server.retry import ServerRetryPolicy
from rlkit.engines.server.transports import Transport, is_local
from rlkit.engines.sglang.api import SGLangApi
from rlkit.engines.sglang.launch import BESIDE_TRAINER, Launch, adapter_words, command, environment, require_sglang
from rlkit.engines.sglang.transports import AS_SGLANG, SGLangDisk, SGLangGroup, SGLangTensors
from rlkit.errors import EngineError, RecipeError
from rlkit.names import OutputPath
from rlkit.ranges import NUMBER, Count
from rlkit.types import Completion, Request

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

DETERMINISTIC = "--enable-deterministic-inference"
LAUNCH = Launch()
RETRY = ServerRetryPolicy()


class SGLangRollouts(ServerEngine):
    """What SGLangServer and SGLangEngine share: how servers are called and started.

    Args:
        launch: How servers are started.
        retry: How long servers are waited for, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    reserved = 2  # SGLang never fills the last two tokens of the context

    def __init__(self, launch: Launch, retry: ServerRetryPolicy, check_weights: bool) -> None:
        super().__init__(
            retry,
            check_weights,
            dtype=launch.dtype,
            adapter_only=launch.adapter_only,
            release_memory=launch.release_memory,
        )
        self.launch = launch

    @abstractmethod
    def start(self, rank: int) -> list[Node]: ...

    def bind(self, runtime: Runtime) -> None:
        self._trainers = gpus_of_trainers(runtime)
        super().bind(runtime)

    def api(self, client: Client) -> ServerApi:
        return SGLangApi(client)

    async def generate(self, request: Request) -> Completion:
        if request.sampling.min_p and DETERMINISTIC in self.launch.args:
            raise EngineError(
                f"sampling has min_p={request.sampling.min_p}, with which SGLang's sampler fails under "
                f"{DETERMINISTIC}; set min_p: 0, or remove the argument from launch.args"
            )
        return await super().generate(request)

    def process(self, gpu: int | None) -> ServerProcess:
        """Return a server that is to run on a GPU and its successors, or on the CPU."""
        policy, dtype, launch = self._runtime.policy, str(self._dtype).removeprefix("torch."), self.launch
        if self._shared(gpu) and launch.memory_fraction is None:
            launch = replace(launch, memory_fraction=BESIDE_TRAINER)

        def words(folder: Path, port: int) -> list[str]:
            write_model(folder / "model", policy, self._stop_ids)
            adapters = adapter_words(policy, gpu) if launch.adapter_only else []
            return [*command(folder / "model", port, launch, dtype, gpu), *adapters, *launch.args]

        return ServerProcess("sglang", words, environment(gpu, self.retry.hang_seconds))

    def _shared(self, gpu: int | None) -> set[int]:
        """Return those GPUs of a server, from its first one on, that the trainer uses too."""
        return set() if gpu is None else self._trainers.intersection(range(gpu, gpu + self.launch.tensor_parallel))


class SGLangServer(SGLangRollouts):
    """SGLang servers that all ranks share: running ones at `urls`, or ones that rlkit starts on this machine.

    Requests go to the server with the least to do, and all turns of a conversation to the same one, which has its
    prefix in the cache. A server that dies, hangs, fails or comes back with old weights is restarted (if it is
    rlkit's) or waited for, synced again, and what it had not finished is requested again. Every token's
    version is checked. After every sync servers' log-probs are compared with the trainer's. What
    is sampled can be repeated where servers run deterministic inference, for which each request brings a seed that
    its sample names; elsewhere SGLang's random numbers depend on what else is in the batch.

    Args:
        urls: Running servers; none starts `servers` here.
        router: An SGLang router in front of `urls`: requests go to it, weights to the servers themselves.
        servers: How many to start.
        first_gpu: The index of the first server's first GPU; the next server takes the next `launch.tensor_parallel`.
        transport: How weights travel: `tensor` (memory of this machine), `group` (a process group, between machines),
            `disk` (files); `auto` is `tensor` where all servers are on this machine and `group` elsewhere.
        folder: Where `disk` writes, seen by all servers; null takes a temporary folder of this machine.
        launch: How servers are started.
        retry: How long servers are waited for, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    def __init__(
        self,
        urls: Sequence[str] = (),
        *,
        router: str | None = None,
        servers: Count = 1,
        first_gpu: Annotated[int, Ge(0), Le(1023), NUMBER] = 0,
        transport: Literal["auto", "tensor", "group", "disk"] = "auto",
        folder: OutputPath | None = None,
        launch: Launch = LAUNCH,
        retry: ServerRetryPolicy = RETRY,
        check_weights: bool = True,
    ) -> None:
        super().__init__(launch, retry, check_weights)
        self.beside = not launch.release_memory
        if router is not None and not urls:
            raise RecipeError(f"SGLangServer has router={router!r} and no urls; add those of the servers behind it")
        if launch.adapter_only and transport == "disk" and not urls:
            raise RecipeError(
                "launch.adapter_only is true and transport is disk for servers that rlkit starts, which "
                "take adapters from memory alone; leave transport out"
            )
        for url in (*urls, *([router] if router else ())):
            if not url.startswith(("http://", "https://")):
                raise RecipeError(f"SGLangServer has the url {url!r}, expected http://… or https://…")
        self.urls = urls
        self.router = router
        self.servers = servers
        self.first_gpu = first_gpu
        self.transport = transport
        self.folder = folder

    @property
    def environment(self) -> Mapping[str, str]:
        """Return what SGLang sets for NCCL, where the trainer may be in one group with its servers."""
        local = self.transport == "auto" and all(map(is_local, self.urls))
        return {} if local or self.transport in ("tensor", "disk") else AS_SGLANG

    def start(self, rank: int) -> list[Node]:
        if rank > 0:
            return []
        if self.urls:
            return [self.node(url) for url in self.urls]
        require_sglang()
        gpus = self._runtime.device.type == "cuda"
        firsts = [self.first_gpu + i * self.launch.tensor_parallel if gpus else None for i in range(self.servers)]
        taken = sorted({gpu for first in firsts for gpu in self._shared(first)})
        if taken:
            warnings.warn(
                f"SGLangServer starts its servers on GPUs {taken}, which the trainer uses too; set first_gpu to the "
                "first one that is free, or choose SGLangEngine, which shares each rank's GPU",
                stacklevel=2,
            )
        return [self.started(self.process(first)) for first in firsts]

    def fronts(self) -> dict[Node, list[Node]]:
        if self.router is None:
            return super().fronts()
        return {self.node(self.router, owned=False): self._nodes}

    def make_transport(self) -> Transport[Any]:
        if self.transport == "disk":
            return SGLangDisk(self._runtime.policy, self.folder)
        here = all(is_local(node.url) for node in self._nodes)
        if self.transport == "tensor" or (self.transport == "auto" and here):
            return SGLangTensors(self._runtime.device)
        if self.launch.adapter_only:
            raise EngineError(
                "launch.adapter_only is true, and adapters cannot travel over a process group; set transport: disk and "
                "a folder that the servers see, or leave launch.adapter_only out"
            )
        return SGLangGroup(self._runtime.device)


class SGLangEngine(SGLangRollouts):
    """An SGLang engine on each rank's own device, which it shares with the trainer.

    It is a server that rlkit starts and that listens on 127.0.0.1 only, not a `sglang.Engine` in the trainer's
    process: if SGLang crashes, it kills its parent. Tensors do not pass through HTTP: they travel in shared
    memory, or by CUDA IPC on a GPU. With `launch.tensor_parallel` above 1, so many neighbouring ranks share one
    engine over their GPUs. Everything else is as in `SGLangServer`.

    Args:
        launch: How the engine is started.
        retry: How long it is waited for, and how often it may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    interruptible = True

    def __init__(self, launch: Launch = LAUNCH, retry: ServerRetryPolicy = RETRY, check_weights: bool = True) -> None:
        super().__init__(launch, retry, check_weights)

    def interrupt(self) -> None:
        self._interruption.begin(self._nodes)

    def start(self, rank: int) -> list[Node]:
        require_sglang()
        device = self._runtime.device
        if rank % self._span:
            return []
        if device.type == "cpu" and self.launch.tensor_parallel > 1:
            raise EngineError(f"launch.tensor_parallel is {self.launch.tensor_parallel} on a CPU, expected 1")
        return [self.started(self.process(device.index or 0 if device.type == "cuda" else None))]

    def serving(self, urls: Sequence[Sequence[str]], rank: int) -> list[str]:
        return list(urls[rank - rank % self._span])

    @property
    def _span(self) -> int:
        """Return how many neighbouring ranks share an engine; only the first of a tensor-parallel group samples."""
        return lcm(self.launch.tensor_parallel, self._runtime.tensor_parallel)

    def make_transport(self) -> Transport[Any]:
        return SGLangTensors(self._runtime.device)


def gpus_of_trainers(runtime: Runtime) -> set[int]:
    """Return the indices of the GPUs on this machine that some rank trains on; all ranks must call this."""
    device, host = runtime.device, socket.gethostname()
    mine = (host, device.index or 0 if device.type == "cuda" else None)
    return {gpu for where, gpu in runtime.gather_world(mine) if where == host and gpu is not None}
