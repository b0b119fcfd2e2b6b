"""A rollout engine over servers that hold the trainer's weights."""

from __future__ import annotations

import re
import socket
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from rlkit.base.errors import EngineError
from rlkit.interfaces.engine import Capability, RolloutEngine
from rlkit.interfaces.launcher import HostedServer, ServerCommand
from rlkit.types import Completion, Request
from rlkit_servers.api import ServerApi
from rlkit_servers.fleet import Fleet
from rlkit_servers.http import Client
from rlkit_servers.process import ServerProcess
from rlkit_servers.push import Push
from rlkit_servers.recovery import Recovery
from rlkit_servers.requests import Requests
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.transports import Transport
from rlkit_servers.update import release
from rlkit_servers.weight_check import TOLERANCES
from rlkit_servers.weights import WeightSync

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream


class _Start(NamedTuple):
    """How a rank has started: a name for the run, the servers that it pushes weights to, and what went wrong."""

    run: str
    urls: list[str]
    problem: str


class ServerEngine(RolloutEngine):
    """Samples on servers that hold the trainer's weights; all ranks share the servers of the first rank.

    A product's engine says how servers are called (`api`), which servers there are (`start`) and how weights are sent
    (`make_transport`).

    Args:
        retry: How long to wait for servers, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
        dtype: The weights' dtype in the engine; `auto` for the dtype in which the trainer computes.
        adapter_only: Push the base to servers once, and then the adapters alone.
        release_memory: Release servers' memory while the trainer learns.
    """

    runtime: Runtime
    """The run, from `bind` on."""

    weight_dtype: torch.dtype
    """The weights' dtype in the engine, from `bind` on."""

    def __init__(
        self,
        retry: ServerRetryPolicy,
        check_weights: bool,
        *,
        dtype: str = "auto",
        adapter_only: bool = False,
        release_memory: bool = False,
    ) -> None:
        self.retry = retry
        self.check_weights = check_weights
        self.dtype = dtype
        self.adapter_only = adapter_only
        self.release_memory = release_memory
        self.fleet = Fleet()
        self.weights = WeightSync(self.fleet, self.check_weights, self.adapter_only)
        self.recovery = Recovery(self.fleet, self.weights, self.retry.hang_seconds)
        self.requests = Requests(type(self).__name__, self.fleet, self.weights, self.recovery, self.retry)

    # what a product implements

    @abstractmethod
    def api(self, client: Client) -> ServerApi:
        """Return the calls of a server."""

    @abstractmethod
    def start(self, rank: int) -> list[InferenceServer]:
        """Return the servers that this rank pushes weights to, after starting those that rlkit starts."""

    @abstractmethod
    def make_transport(self) -> Transport[Any]:
        """Return the transport of weights; called once the fleet is known."""

    def sampling_urls(self, urls: Sequence[Sequence[str]], rank: int) -> list[str]:
        """Return the servers that sample this rank's requests, from those that each rank pushes weights to."""
        return list(urls[0])

    def endpoints(self, servers: list[InferenceServer]) -> dict[InferenceServer, list[InferenceServer]]:
        """Return the targets of requests, each with the servers behind it: by default, each server itself."""
        return {server: [server] for server in servers}

    # what a product calls

    def connect(self, url: str, process: HostedServer | None = None, owned: bool = True) -> InferenceServer:
        """Return the server at an address."""
        api = self.api(Client(url))
        api.routers = self.routers
        return InferenceServer(api, self.retry, process, owned)

    def launch_server(self, command: ServerCommand, *, here: bool = False) -> InferenceServer:
        """Start a server where the run's launcher places it, or else on this machine; always `here`, if so."""
        hosted = None if here else self.runtime.host_server(command)
        process = hosted or ServerProcess(command)
        process.start()
        return self.connect(process.url, process)

    # the engine

    def bind(self, runtime: Runtime) -> None:
        from rlkit.models.lora import adapted_layers, adapts_parameter
        from rlkit.models.vision import reads_pictures

        config = runtime.policy.config
        if reads_pictures(config) and config.model_type not in self.picture_models:
            served = f"serves pictures of {', '.join(self.picture_models)}" if self.picture_models else "serves texts"
            raise EngineError(
                f"{type(self).__name__} {served} alone, and model.path reads pictures (model_type "
                f"{config.model_type!r}); choose rollout.engine: TorchEngine"
            )
        self.runtime = runtime
        self.weight_dtype = _weight_dtype(self.dtype, runtime)
        self.requests.bind(runtime)
        rank, world = _rank()
        layers = adapted_layers(runtime.policy)
        if self.adapter_only and not layers:
            raise EngineError("launch.adapter_only is true, but there are no adapters; set model.lora, or leave it out")
        if self.adapter_only and any(layer.lora_magnitude_vector for layer in layers.values()):
            raise EngineError(
                "launch.adapter_only is true, but servers do not apply DoRA; leave it out to send merged weights, or "
                "set model.lora.use_dora: false"
            )
        if self.adapter_only and any(map(adapts_parameter, layers.values())):
            raise EngineError(
                "launch.adapter_only is true, but servers do not apply adapters of experts and routers, which this "
                "model has; leave it out to send merged weights, or name the other layers in model.lora.targets"
            )
        self.recovery.sharded = world > 1 and any(hasattr(p, "full_tensor") for p in runtime.policy.parameters())
        problem = ""
        try:
            self.fleet.owned = self.start(rank)
        except EngineError as error:
            problem = str(error)
        here = _Start(uuid.uuid4().hex[:8], [server.url for server in self.fleet.owned], problem)
        ranks = runtime.gather_world(here)
        for number, start in enumerate(ranks):
            if start.problem:
                raise EngineError(problem or f"rank {number}: {start.problem}")
        run = ranks[0].run
        owned = {server.url: server for server in self.fleet.owned}
        urls = self.sampling_urls([start.urls for start in ranks], rank)
        servers = [owned.get(url) or self.connect(url, owned=False) for url in urls]
        self.fleet.use(servers, self.endpoints(servers))
        if self.adapter_only:
            for endpoint in self.fleet.endpoints:
                endpoint.api.adapter = f"rlkit-{run}"
        tolerance = TOLERANCES[self.weight_dtype]
        transport = self.make_transport()
        push = Push(transport, self.weight_dtype, tolerance, self.adapter_only, runtime.broadcast_tp, runtime.device)
        self.weights.bind(runtime, push, run)

    async def generate(self, request: Request) -> Completion:
        return await self.requests.generate(request)

    async def sync(self, stream: WeightStream, version: int) -> None:
        await self.weights.sync(stream, version)
        self.recovery.restore_in_background()

    @property
    def needs_weights(self) -> bool:
        return self.weights.needed

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Keep the trainer's weights readable; afterwards release servers' memory, if the recipe says so.

        All ranks have finished sampling when one of them leaves, so the memory of a shared server is free by then.
        """
        self.weights.unlock()
        completed = False
        try:
            yield
            self.weights.lock_for_training()
            completed = True
        finally:
            for server in self.fleet.owned if self.release_memory else ():
                release(server)
            if completed and self.release_memory:  # trainers of all ranks wait: a server may have shared their GPUs
                self.runtime.gather_world(None)

    def health(self) -> dict[str, float]:
        return {
            **self.fleet.health(),
            **self.weights.health(),
            **self.requests.health(),
            "restarts": float(self.fleet.restarts),
        }

    def close(self) -> None:
        self.fleet.close()
        self.weights.close()


def names_model(package: str, models: str, architecture: str) -> bool:
    """Whether the sources of an installed package name a model's class; nothing of it is imported.

    Args:
        package: The package.
        models: A pattern of the files with its models, relative to the package.
        architecture: The name of the class.
    """
    spec = find_spec(package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob(models)]
    pattern = re.compile(rf"\b{re.escape(architecture)}\b")
    return any(pattern.search(file.read_text(encoding="utf-8")) for file in files)


def trainer_gpus(runtime: Runtime) -> set[int]:
    """Return the indices of this machine's GPUs that ranks train on; all ranks must call this."""
    device, host = runtime.device, socket.gethostname()
    here = (host, device.index or 0 if device.type == "cuda" else None)
    return {gpu for other_host, gpu in runtime.gather_world(here) if other_host == host and gpu is not None}


class DeviceEngine(ServerEngine):
    """A server on each rank's own device, or one that neighbouring ranks share over theirs."""

    capabilities = Capability.INTERRUPT

    gpus_per_server = 1
    """Ranks whose devices a server uses."""

    model_sources: ClassVar[tuple[str, str]] = ("", "")
    """The product's package, and a pattern of the files in it that name the classes of its models."""

    default_options: ClassVar[Mapping[str, object]] = {"launch": {"release_memory": True}}

    @classmethod
    def implements(cls, architecture: str) -> bool:
        return names_model(*cls.model_sources, architecture)

    def interrupt(self) -> None:
        self.requests.interrupt()

    def sampling_urls(self, urls: Sequence[Sequence[str]], rank: int) -> list[str]:
        return list(urls[rank - rank % self.group_size])

    @property
    def group_size(self) -> int:
        """How many neighbouring ranks share a server; only the first of the ranks with the same rows samples."""
        return lcm(self.gpus_per_server, self.runtime.tensor_parallel * self.runtime.sequence_parallel)


def _weight_dtype(name: str, runtime: Runtime) -> torch.dtype:
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    device = runtime.device.type
    with runtime.autocast():
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32


def _rank() -> tuple[int, int]:
    """Return this process's rank, and the number of ranks."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
