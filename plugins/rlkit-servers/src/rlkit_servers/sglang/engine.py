"""Rollouts from SGLang: servers, or an engine on each rank's own device."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Le

from rlkit.base.errors import EngineError, RecipeError
from rlkit.base.names import OutputPath
from rlkit.base.ranges import NUMBER, Count
from rlkit.interfaces.launcher import ServerCommand, ServerSite, is_launched
from rlkit.types import Completion, Request, Sampling
from rlkit_servers.api import ServerApi
from rlkit_servers.http import Client
from rlkit_servers.launched import RETRY, LaunchedEngine, RankServers, SeparateServers
from rlkit_servers.process import write_model
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.routes import ARGUMENT as ROUTES
from rlkit_servers.routes import problem_at
from rlkit_servers.server import InferenceServer
from rlkit_servers.sglang.api import SGLangApi
from rlkit_servers.sglang.changes import LOADER
from rlkit_servers.sglang.launch import (
    BESIDE_TRAINER,
    KEY_FILE,
    Launch,
    adapter_arguments,
    command,
    describe_installation,
    environment,
    require_sglang,
)
from rlkit_servers.sglang.pictures import ARGUMENTS, ENVIRONMENT, MODEL_TYPES, RequestPictures
from rlkit_servers.sglang.transports import SGLANG_NCCL, SGLangChanges, SGLangDisk, SGLangGroup, SGLangTensors
from rlkit_servers.teacher import ServerTeacher
from rlkit_servers.transports import Transport, is_local

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

DETERMINISTIC = "--enable-deterministic-inference"
LAUNCH = Launch()


class SGLangRollouts(LaunchedEngine):
    """What SGLangServer and SGLangEngine share: how servers are called and started."""

    launch: Launch
    reserved = 2  # SGLang never fills the last two tokens of the context
    picture_models = MODEL_TYPES
    packages = MappingProxyType({"sglang": describe_installation})
    loader_arguments: Sequence[str] = ()
    """Arguments that servers need for the transport of weights."""
    _key = ""
    """What callers on other machines must send."""
    _pictures: RequestPictures | None = None
    """Writes pictures into requests, from `bind` on, for models that read them."""

    def routes_problem(self, sampling: Sampling, on_gpu: bool, asked: bool) -> str | None:
        return problem_at(getattr(self, "urls", ()), asked)

    @staticmethod
    def require_installed() -> None:
        require_sglang()

    def bind(self, runtime: Runtime) -> None:
        if runtime.policy.config.model_type in MODEL_TYPES:
            if self.launch.adapter_only:
                raise EngineError(
                    "launch.adapter_only is true, but adapters of a model that reads pictures are only sent merged; "
                    "leave it out"
                )
            self._pictures = RequestPictures(runtime.policy.config)
        super().bind(runtime)

    def api(self, client: Client) -> ServerApi:
        return SGLangApi(client, self._pictures)

    def teacher(self, urls: Sequence[str]) -> ServerTeacher:
        return ServerTeacher(urls, SGLangApi)

    async def generate(self, request: Request) -> Completion:
        if request.sampling.min_p and DETERMINISTIC in self.launch.args:
            raise EngineError(
                f"sampling has min_p={request.sampling.min_p}, with which SGLang's sampler fails under "
                f"{DETERMINISTIC}; set min_p: 0, or remove the argument from launch.args"
            )
        return await super().generate(request)

    def command(self, gpu: int | None) -> ServerCommand:
        from rlkit.models.save import save_processor

        policy, pictures = self.runtime.policy, self._pictures is not None
        dtype = str(self.weight_dtype).removeprefix("torch.")

        def write_files(folder: Path) -> None:
            write_model(folder / "model", policy, self.runtime.stop_ids)
            if self.launch.structures:
                self.runtime.tokenizer.save_pretrained(folder / "model")
            if pictures:
                save_processor(policy, self.runtime.tokenizer, folder / "model")
            (folder / KEY_FILE).write_text(f"api-key: {self._key}\n", encoding="utf-8")

        def words(site: ServerSite) -> list[str]:
            launch = self.launch
            if is_local(site.host) and self.shared_gpus(site.first_gpu) and launch.memory_fraction is None:
                launch = replace(launch, memory_fraction=BESIDE_TRAINER)
            adapters = adapter_arguments(policy, site.first_gpu) if launch.adapter_only else []
            routes = [ROUTES] if self.routers is not None else []
            more = (*adapters, *routes, *(ARGUMENTS if pictures else ()), *self.loader_arguments, *launch.args)
            return [*command(site, launch, dtype), *more]

        gpus = 0 if gpu is None else self.launch.tensor_parallel
        variables = environment(gpu, self.retry.hang_seconds) | (ENVIRONMENT if pictures else {})
        return ServerCommand("sglang", words, write_files, variables, gpus, gpu)


class SGLangServer(SGLangRollouts, SeparateServers):
    """SGLang servers that all ranks share: running ones at `urls`, or ones that rlkit starts.

    Servers start on the first rank's machine and listen on 127.0.0.1 only, unless the run's launcher places them on its
    nodes; they then refuse calls without the run's key.

    Requests go to the least busy server, and all turns of a conversation to the same one, which has its prefix in the
    cache. A server that dies, hangs, fails or comes back with old weights is restarted (if rlkit started it) or waited
    for, then synced again, and its unfinished requests are repeated. The version of every token is checked. After every
    sync, servers' log-probs are compared with the trainer's. Samples are repeatable if servers run deterministic
    inference, since each request carries its sample's seed; otherwise SGLang's random numbers depend on what else is in
    the batch.

    Args:
        urls: Running servers; if empty, rlkit starts `servers`.
        router: An SGLang router in front of `urls`: requests go to it, weights to the servers themselves.
        servers: Number of servers to start.
        first_gpu: The index of the first server's first GPU on this machine; the next server takes the next
            `launch.tensor_parallel`.
        transport: How weights are sent: `tensor` (memory of this machine), `group` (a process group, between machines),
            `disk` (files), `changes` (elements that differ, over HTTP; running servers need `--custom-weight-loader
            rlkit_servers.sglang.changes.load`, and memory for a copy of the weights); `auto` is `tensor` if all servers
            are on this machine, otherwise `group`.
        folder: Folder that `disk` writes to, visible to all servers; null for a temporary folder of this machine.
        launch: How servers are started.
        retry: How long to wait for servers, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    beside_trainer = "SGLangEngine"
    is_placed = True

    def __init__(
        self,
        urls: Sequence[OutputPath] = (),
        *,
        router: OutputPath | None = None,
        servers: Count = 1,
        first_gpu: Annotated[int, Ge(0), Le(1023), NUMBER] = 0,
        transport: Literal["auto", "tensor", "group", "disk", "changes"] = "auto",
        folder: OutputPath | None = None,
        launch: Launch = LAUNCH,
        retry: ServerRetryPolicy = RETRY,
        check_weights: bool = True,
    ) -> None:
        super().__init__(launch, retry, check_weights, urls=urls, servers=servers, first_gpu=first_gpu, router=router)
        if router is not None and not urls:
            raise RecipeError(f"SGLangServer has router={router!r} without urls; add those of the servers behind it")
        if launch.adapter_only and transport == "disk" and not urls:
            raise RecipeError(
                "launch.adapter_only is true and transport is disk, but servers that rlkit starts take adapters from "
                "memory alone; leave transport out"
            )
        self.transport = transport
        self.folder = folder
        self.loader_arguments = ("--custom-weight-loader", LOADER) if transport == "changes" else ()
        self._key = secrets.token_urlsafe(32)

    @property
    def server_gpus(self) -> tuple[int, ...]:
        return () if self.urls else (self.launch.tensor_parallel,) * self.servers

    def bind(self, runtime: Runtime) -> None:
        self._key = runtime.gather_world(self._key)[0]
        super().bind(runtime)

    def api(self, client: Client) -> ServerApi:
        keyless = self.urls or is_local(client.url)
        return super().api(client if keyless else Client(client.url, {"Authorization": f"Bearer {self._key}"}))

    @property
    def environment(self) -> Mapping[str, str]:
        """Return SGLang's settings of NCCL if the trainer may share a process group with servers."""
        local = self.transport == "auto" and all(map(is_local, self.urls)) and (self.urls or not is_launched())
        return {} if local or self.transport in ("tensor", "disk", "changes") else SGLANG_NCCL

    def endpoints(self, servers: list[InferenceServer]) -> dict[InferenceServer, list[InferenceServer]]:
        if self.router is None:
            return super().endpoints(servers)
        return {self.connect(self.router, owned=False): servers}

    def make_transport(self) -> Transport[Any]:
        if self.transport == "disk":
            return SGLangDisk(self.runtime.policy, self.folder)
        all_local = all(is_local(server.url) for server in self.fleet.servers)
        if self.transport == "tensor" or (self.transport == "auto" and all_local):
            return SGLangTensors(self.runtime.device)
        if self.launch.adapter_only:
            way = "as changes" if self.transport == "changes" else "over a process group"
            raise EngineError(
                f"launch.adapter_only is true, but adapters cannot be sent {way}; set transport: disk and a folder "
                "that the servers see, or leave launch.adapter_only out"
            )
        if self.transport == "changes":
            return SGLangChanges()
        return SGLangGroup(self.runtime.device)


class SGLangEngine(SGLangRollouts, RankServers):
    """An SGLang engine on each rank's own device, which it shares with the trainer.

    rlkit starts it as a server that listens on 127.0.0.1 only, not as a `sglang.Engine` in the trainer's process: when
    SGLang crashes, it kills its parent. Tensors do not pass through HTTP, but through shared memory, or CUDA IPC on a
    GPU. With `launch.tensor_parallel` above 1, that many neighbouring ranks share one engine over their GPUs. In all
    else it behaves as `SGLangServer`.

    Args:
        launch: How the engine is started.
        retry: How long to wait for the engine, and how often it may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    preference = 2
    model_sources = ("sglang", "srt/models/*.py")

    def __init__(self, launch: Launch = LAUNCH, retry: ServerRetryPolicy = RETRY, check_weights: bool = True) -> None:
        super().__init__(launch, retry, check_weights)

    @classmethod
    def missing(cls) -> str | None:
        incomplete = "torch-memory-saver, which launch.release_memory needs, is not installed"
        return super().missing() or (incomplete if find_spec("torch_memory_saver") is None else None)

    def make_transport(self) -> Transport[Any]:
        return SGLangTensors(self.runtime.device)
