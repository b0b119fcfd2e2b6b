"""Engines of products whose servers rlkit starts: on devices of their own, or on those of the ranks."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from rlkit.base.errors import EngineError, RecipeError
from rlkit.base.names import USER_ONLY
from rlkit.base.ranges import Count, ShareBelowOne
from rlkit.interfaces.engine import Capability, check_followed
from rlkit.interfaces.launcher import ServerCommand
from rlkit.types import Structure
from rlkit_servers.engine import DeviceEngine, ServerEngine, trainer_gpus
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.transports import is_local

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

RETRY = ServerRetryPolicy()


@dataclass(frozen=True)
class ServerLaunch:
    """How servers are started.

    Args:
        tensor_parallel: GPUs of one server, over which it shards the model.
        dtype: The weights' dtype in the engine; `auto` for the dtype in which the trainer computes.
        memory_fraction: Share of the GPU memory for weights and KV cache; null for the product's choice.
        release_memory: Release the memory while the trainer learns, for engines on the trainer's GPUs.
        adapter_only: With LoRA, push the base to servers once and then the adapters alone, which servers apply;
            otherwise weights arrive merged.
        structures: Start servers with the policy's tokenizer and llguidance, for `rollout.sampling.structure`.
        args: Additional arguments of the server's command.
    """

    tensor_parallel: Count = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    memory_fraction: ShareBelowOne | None = None
    release_memory: bool = False
    adapter_only: bool = False
    structures: bool = False
    args: Annotated[Sequence[str], USER_ONLY] = ()


class LaunchedEngine(ServerEngine):
    """An engine whose servers are started as a `ServerLaunch` says.

    Args:
        launch: How servers are started.
        retry: How long to wait for servers, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    capabilities = Capability.TEACHER | Capability.CANDIDATES

    def __init__(self, launch: ServerLaunch, retry: ServerRetryPolicy, check_weights: bool) -> None:
        super().__init__(
            retry,
            check_weights,
            dtype=launch.dtype,
            adapter_only=launch.adapter_only,
            release_memory=launch.release_memory,
        )
        self.launch = launch

    @staticmethod
    @abstractmethod
    def require_installed() -> None:
        """Check that a server can be started here.

        Raises:
            EngineError: The product is not installed, or its release is not supported.
        """

    @abstractmethod
    def command(self, gpu: int | None) -> ServerCommand:
        """Return the launch command.

        Args:
            gpu: The index of the server's first GPU on this machine; None for a CPU.
        """

    def check_structure(self, structure: Structure) -> None:
        if not self.launch.structures:
            raise RecipeError(
                f"{type(self).__name__} samples any text; remove it, or choose rollout.engine: TorchEngine, or set "
                "launch.structures: true"
            )
        check_followed(structure)

    def bind(self, runtime: Runtime) -> None:
        self._trainer_gpus = trainer_gpus(runtime)
        super().bind(runtime)

    def shared_gpus(self, first: int | None) -> set[int]:
        """Return the GPUs that a server, from its first one on, shares with the trainer."""
        width = self.launch.tensor_parallel
        return set() if first is None else self._trainer_gpus.intersection(range(first, first + width))


class SeparateServers(LaunchedEngine):
    """Servers that all ranks share: running ones, or ones that rlkit starts.

    Args:
        urls: Running servers; if empty, rlkit starts `servers`.
        servers: Number of servers to start.
        first_gpu: The index of the first server's first GPU; the next server takes the next `launch.tensor_parallel`.
        router: A router in front of `urls`, if the product has one.

    Raises:
        RecipeError: A url is none.
    """

    beside_trainer = ""
    """The product's engine that shares each rank's GPU, for messages."""
    is_placed = False
    """Whether the run's launcher may place the servers on its nodes."""

    def __init__(
        self,
        launch: ServerLaunch,
        retry: ServerRetryPolicy,
        check_weights: bool,
        *,
        urls: Sequence[str],
        servers: int,
        first_gpu: int,
        router: str | None = None,
    ) -> None:
        super().__init__(launch, retry, check_weights)
        if not launch.release_memory:
            self.capabilities |= Capability.BESIDE
        for url in filter(None, (*urls, router)):
            if not url.startswith(("http://", "https://")):
                raise RecipeError(f"{type(self).__name__} has the url {url!r}, expected http://… or https://…")
        self.urls = urls
        self.router = router
        self.servers = servers
        self.first_gpu = first_gpu

    def start(self, rank: int) -> list[InferenceServer]:
        if rank > 0:
            return []
        if self.urls:
            return [self.connect(url) for url in self.urls]
        self.require_installed()
        width, on_gpus = self.launch.tensor_parallel, self.runtime.device.type == "cuda"
        firsts = [self.first_gpu + i * width if on_gpus else None for i in range(self.servers)]
        servers = [self.launch_server(self.command(first), here=not self.is_placed) for first in firsts]
        here = [first for first, server in zip(firsts, servers, strict=True) if is_local(server.url)]
        shared = sorted({gpu for first in here for gpu in self.shared_gpus(first)})
        if shared:
            warnings.warn(
                f"{type(self).__name__} starts its servers on GPUs {shared}, which the trainer uses too; set first_gpu "
                f"to the first free one, or choose {self.beside_trainer}, which shares each rank's GPU",
                stacklevel=2,
            )
        return servers


class RankServers(LaunchedEngine, DeviceEngine):
    """A server on each rank's own device, which it shares with the trainer, as a `ServerLaunch` says."""

    capabilities = LaunchedEngine.capabilities | DeviceEngine.capabilities

    def __init__(self, launch: ServerLaunch, retry: ServerRetryPolicy, check_weights: bool) -> None:
        super().__init__(launch, retry, check_weights)
        self.gpus_per_server = launch.tensor_parallel

    @classmethod
    def missing(cls) -> str | None:
        try:
            cls.require_installed()
        except EngineError as error:
            return str(error).partition(";")[0]
        return None

    def start(self, rank: int) -> list[InferenceServer]:
        self.require_installed()
        device = self.runtime.device
        if rank % self.group_size:
            return []
        if device.type == "cpu" and self.launch.tensor_parallel > 1:
            raise EngineError(f"launch.tensor_parallel is {self.launch.tensor_parallel} on a CPU, expected 1")
        return [self.launch_server(self.command(device.index or 0 if device.type == "cuda" else None), here=True)]
