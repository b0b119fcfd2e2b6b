"""The trainer's side: how servers are called and started, and how weights reach them."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le
from rlkit_servers.api import ServerApi, ServerOutput
from rlkit_servers.engine import ServerEngine
from rlkit_servers.http import Client
from rlkit_servers.process import write_model
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import DEADLINES, UpdateStep
from rlkit_servers.transports import FileTransport, Transport, is_local

from rlkit.base.ranges import NUMBER, Count, PositiveInt
from rlkit.interfaces.engine import Capability, check_followed
from rlkit.interfaces.launcher import ServerCommand, ServerSite
from rlkit.types import Request, Structure

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

RETRY = ServerRetryPolicy()
TOKEN = "RLKIT_ENGINE_TOKEN"
"""The environment variable with the secret that every call must send."""

PACKAGES = Path(__file__).parents[1]


class HttpApi(ServerApi):
    """The calls of `python -m rlkit_engine_http`."""

    product = "HttpEngine"

    async def health(self, deadline: float) -> None:
        await self.client.get("/health", deadline)

    async def weight_version(self) -> str:
        response = await self.client.get("/health", 10.0)
        return str(response["label"])

    async def generate(self, request: Request) -> ServerOutput:
        sampling = request.sampling
        body = {
            "tokens": request.tokens,
            "key": request.key,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "stop_ids": sampling.stop_ids,
            "structure": sampling.structure and asdict(sampling.structure),
            "continues": request.continues,
        }
        return read_output(await self.client.post("/generate", body, request.deadline or DEADLINES[UpdateStep.CHECK]))

    async def probe(self, rows: Sequence[Sequence[int]], count: int, deadline: float) -> list[ServerOutput]:
        responses = await self.client.post("/probe", {"rows": rows, "count": count}, deadline)
        return [read_output(response) for response in responses]

    async def perform(self, step: UpdateStep, label: str, brackets: bool) -> None:
        if step is UpdateStep.PAUSE:
            await self.client.post("/pause", {}, DEADLINES[step])
        if step is UpdateStep.CONTINUE:
            await self.client.post("/continue", {"label": label}, DEADLINES[step])


def read_output(response: Any) -> ServerOutput:
    """Return the output in a server's response; raises one of `UNREADABLE` if it has none."""
    labels = [str(label) for label in response["labels"]]
    tokens = [int(token) for token in response["tokens"]]
    logps = [float(logp) for logp in response["logps"]]
    candidates: list[Sequence[int]] = [array("i", map(int, ids)) for ids in response["candidates"]]
    return ServerOutput(tokens, logps, labels, response["stopped"] is True, candidates=candidates)


class SharedFiles(FileTransport):
    """Weights, or their changes, in files of shared memory, whose names travel over HTTP.

    Servers on other machines get the contents.
    """

    def __init__(self) -> None:
        super().__init__(changes=True)

    async def load(self, api: ServerApi, parcel: Path) -> None:
        deadline = DEADLINES[UpdateStep.LOAD]
        if is_local(api.client.url):
            await api.client.post("/weights", {"file": str(parcel)}, deadline)
        else:
            await api.client.post_file("/weights", parcel, deadline)


class HttpEngine(ServerEngine):
    """TorchEngine in separate processes, which sample on other cores, GPUs or nodes than the trainer's.

    Samples equal those of TorchEngine token for token, except for floating-point noise. A server that dies or hangs is
    restarted and synced again, and its unfinished requests are repeated. Servers start on this machine and listen on
    127.0.0.1 only, unless the run's launcher places them on its nodes. They refuse calls without the run's secret.

    Args:
        servers: Number of servers to start.
        first_gpu: The index of the first server's GPU, if the trainer is on a GPU; the next server takes the next GPU.
        threads: CPU threads of each server.
        max_rows: Largest number of requests in a server's batch; further requests wait.
        max_kv_tokens: Largest size of a server's key-value cache, as rows times the longest row.
        retry: How long to wait for servers, and how often they may fail.
        check_weights: Compare log-probs with the trainer's after every sync.
    """

    capabilities = Capability.BESIDE | Capability.CANDIDATES

    def __init__(
        self,
        servers: Count = 1,
        *,
        first_gpu: Annotated[int, Ge(0), Le(1023), NUMBER] = 1,
        threads: Count = 1,
        max_rows: Count = 256,
        max_kv_tokens: PositiveInt = 262144,
        retry: ServerRetryPolicy = RETRY,
        check_weights: bool = True,
    ) -> None:
        super().__init__(retry, check_weights)
        self.servers = servers
        self.first_gpu = first_gpu
        self.threads = threads
        self.max_rows = max_rows
        self.max_kv_tokens = max_kv_tokens
        self._secret = secrets.token_urlsafe(32)

    def check_structure(self, structure: Structure) -> None:
        check_followed(structure)

    def bind(self, runtime: Runtime) -> None:
        self._secret = runtime.gather_world(self._secret)[0]
        super().bind(runtime)

    def api(self, client: Client) -> ServerApi:
        return HttpApi(Client(client.url, {"Authorization": f"Bearer {self._secret}"}))

    def make_transport(self) -> Transport[Any]:
        return SharedFiles()

    @property
    def server_gpus(self) -> tuple[int, ...]:
        return (1,) * self.servers

    def start(self, rank: int) -> list[InferenceServer]:
        if rank > 0:
            return []
        return [self.launch_server(self.command(number)) for number in range(self.servers)]

    def command(self, number: int) -> ServerCommand:
        """Return the launch command."""
        on_gpu = self.runtime.device.type != "cpu"
        variables = {TOKEN: self._secret, "OMP_NUM_THREADS": str(self.threads)}
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGES), os.environ.get("PYTHONPATH"))))

        def write_files(folder: Path) -> None:
            write_model(folder / "model", self.runtime.policy, frozenset())
            self.runtime.tokenizer.save_pretrained(folder / "model")

        return ServerCommand(
            "engine-http",
            self.words,
            write_files,
            variables,
            gpus=int(on_gpu),
            first_gpu=self.first_gpu + number if on_gpu else None,
        )

    def words(self, site: ServerSite) -> list[str]:
        """Return a server's command line."""
        options = {
            "host": site.host, "port": site.port, "context": self.runtime.context, "max-rows": self.max_rows,
            "device": "cpu" if site.first_gpu is None else f"cuda:{site.first_gpu}",
            "dtype": str(self.weight_dtype).removeprefix("torch."), "max-kv-tokens": self.max_kv_tokens,
        }  # fmt: skip
        words = (site.python, "-P", "-m", "rlkit_engine_http", str(site.folder / "model"))
        return [*words, *(f"--{name}={value}" for name, value in options.items())]
