"""Rollouts from vLLM: servers, or an engine on each rank's own device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from rlkit_servers.api import ServerApi
from rlkit_servers.http import Client
from rlkit_servers.launched import RETRY, LaunchedEngine, RankServers, SeparateServers
from rlkit_servers.process import write_model
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.routes import ARGUMENT as ROUTES
from rlkit_servers.routes import problem_at
from rlkit_servers.teacher import ServerTeacher
from rlkit_servers.transports import Transport, is_local

from rlkit.base.errors import EngineError, RecipeError
from rlkit.base.names import OutputPath
from rlkit.base.ranges import NUMBER, Count
from rlkit.interfaces.launcher import ServerCommand, ServerSite
from rlkit.types import Sampling
from rlkit_engine_vllm.api import VllmApi
from rlkit_engine_vllm.launch import (
    BESIDE_TRAINER,
    CPU_HEADS,
    SECOND_RUNNER,
    VllmLaunch,
    adapter_arguments,
    command,
    environment,
    require_vllm,
)
from rlkit_engine_vllm.transport import FolderTransport, VllmChanges, shared_memory

LAUNCH = VllmLaunch()


class VllmRollouts(LaunchedEngine):
    """What VllmServer and VllmEngine share: how servers are called and started."""

    launch: VllmLaunch

    @staticmethod
    def require_installed() -> None:
        require_vllm()

    def routes_problem(self, sampling: Sampling, on_gpu: bool, asked: bool) -> str | None:
        by = "vLLM returns them by its second model runner alone"
        urls = getattr(self, "urls", ())
        if not on_gpu and not urls:
            return f"{by}, which needs a GPU"
        if sampling.truncates:
            return f"{by}, whose log-probs are not those of the full softmax where rollout.sampling truncates"
        untested = f"{by}, with which rlkit was not run on a GPU; set train.router_replay: true to choose it"
        return problem_at(urls, asked) or (None if asked else untested)

    def api(self, client: Client) -> ServerApi:
        return VllmApi(client, self.launch.structures)

    def teacher(self, urls: Sequence[str]) -> ServerTeacher:
        return ServerTeacher(urls, VllmApi)

    def command(self, gpu: int | None) -> ServerCommand:
        """Return the launch command, on a GPU of this machine and its successors, or on the CPU.

        Raises:
            EngineError: vLLM cannot run the model on a CPU.
        """
        policy, launch = self.runtime.policy, self.launch
        gpus = [] if gpu is None else list(range(gpu, gpu + launch.tensor_parallel))
        if not gpus:
            self._check_cpu()
        if self.shared_gpus(gpu) and launch.memory_fraction is None:
            launch = replace(launch, memory_fraction=BESIDE_TRAINER)
        dtype = str(self.weight_dtype).removeprefix("torch.")

        def write_files(folder: Path) -> None:
            write_model(folder / "model", policy, self.runtime.stop_ids)
            if launch.structures:
                self.runtime.tokenizer.save_pretrained(folder / "model")

        def words(site: ServerSite) -> list[str]:
            line = command(site.folder / "model", site.port, launch, dtype, self.runtime.context, on_gpu=bool(gpus))
            routes = [ROUTES] if self.routers is not None else []
            return [*line, *routes, *(adapter_arguments(policy) if launch.adapter_only else ()), *launch.args]

        return ServerCommand(
            "vllm",
            words,
            write_files,
            environment(gpus) | ({SECOND_RUNNER: "1"} if self.routers is not None else {}),
            len(gpus),
            gpu,
        )

    def _check_cpu(self) -> None:
        config = self.runtime.policy.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if size not in CPU_HEADS:
            raise EngineError(
                f"model.path has attention heads of {size}, but vLLM computes {', '.join(map(str, CPU_HEADS))} on a "
                "CPU; choose rollout.engine: TorchEngine"
            )
        if self.launch.tensor_parallel > 1:
            raise EngineError(f"launch.tensor_parallel is {self.launch.tensor_parallel} on a CPU, expected 1")


class VllmServer(VllmRollouts, SeparateServers):
    """vLLM servers that all ranks share: running ones at `urls`, or ones that rlkit starts on this machine.

    Requests go to the least busy server, and all turns of a conversation to the same one, which has its prefix in the
    cache. A server that dies, hangs, fails or comes back with old weights is restarted (if rlkit started it) or waited
    for, then synced again, and its unfinished requests are repeated. The version of every token is checked. After every
    sync, servers' log-probs are compared with the trainer's. Requests in flight wait during a sync, and the new weights
    continue them.

    Args:
        urls: Running servers, started as the package's README says; if empty, rlkit starts `servers` here.
        servers: Number of servers to start.
        first_gpu: The index of the first server's first GPU; the next server takes the next `launch.tensor_parallel`.
        transport: How weights are sent: `tensor` (files in this machine's shared memory), `disk` (files in `folder`) or
            `changes` (elements that differ, over HTTP; servers need memory for a copy of the weights); `auto` is
            `tensor` if all servers are on this machine, otherwise `disk`.
        folder: Folder that `disk` writes to, visible to all servers; null for a temporary folder of this machine.
        launch: How servers are started.
        retry: How long to wait for servers, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    beside_trainer = "VllmEngine"

    def __init__(
        self,
        urls: Sequence[OutputPath] = (),
        *,
        servers: Count = 1,
        first_gpu: Annotated[int, Ge(0), Le(1023), NUMBER] = 0,
        transport: Literal["auto", "tensor", "disk", "changes"] = "auto",
        folder: OutputPath | None = None,
        launch: VllmLaunch = LAUNCH,
        retry: ServerRetryPolicy = RETRY,
        check_weights: bool = True,
    ) -> None:
        super().__init__(launch, retry, check_weights, urls=urls, servers=servers, first_gpu=first_gpu)
        if transport == "changes" and launch.adapter_only:
            raise RecipeError(
                "launch.adapter_only is true, but adapters cannot be sent as changes; leave one of them out"
            )
        if not all(map(is_local, urls)) and transport != "changes" and (transport == "tensor" or folder is None):
            raise RecipeError(
                "VllmServer has urls of other machines; set transport: disk and a folder that the servers see, or "
                "transport: changes"
            )
        self.transport = transport
        self.folder = folder

    def make_transport(self) -> Transport[Any]:
        if self.transport == "changes":
            return VllmChanges()
        local = all(is_local(server.url) for server in self.fleet.servers)
        if self.transport == "disk" or not local:
            return FolderTransport(self.runtime.policy, self.folder)
        return FolderTransport(self.runtime.policy, shared_memory(self.runtime.policy, self.weight_dtype))


class VllmEngine(VllmRollouts, RankServers):
    """A vLLM engine on each rank's own device, which it shares with the trainer.

    rlkit starts it as a server that listens on 127.0.0.1 only. Weights travel as files in shared memory. With
    `launch.tensor_parallel` above 1, that many neighbouring ranks share one engine over their GPUs. In all else it
    behaves as `VllmServer`.

    Args:
        launch: How the engine is started.
        retry: How long to wait for the engine, and how often it may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    preference = 1
    model_sources = ("vllm", "model_executor/models/registry.py")

    def __init__(
        self, launch: VllmLaunch = LAUNCH, retry: ServerRetryPolicy = RETRY, check_weights: bool = True
    ) -> None:
        super().__init__(launch, retry, check_weights)

    def make_transport(self) -> Transport[Any]:
        return FolderTransport(self.runtime.policy, shared_memory(self.runtime.policy, self.weight_dtype))
