"""A server that rlkit starts: its command line, its process, its log."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from rlkit.engines.server import supervisor
from rlkit.errors import EngineError
from rlkit.ranges import Count, ShareBelowOne

FIRST, LAST = (0, 5, 17), (0, 5, 23)
"""The releases that rlkit's tests drive lie between these."""

BRACKETS_SINCE = (0, 5, 18)
"""From here on an update stands between `begin_weight_update` and `end_weight_update`, and may come in the middle of
requests; before, those begin anew."""

SUPERVISOR = Path(supervisor.__file__)
TAIL_LINES = 25
PORTS = range(20000, 30000)
CPU_TOKENS = "65536"
"""Tokens of KV cache on a CPU, where SGLang would take most of the memory otherwise."""

OF_TRAINERS = re.compile(
    "(LOCAL_)?(RANK|WORLD_SIZE)|MASTER_(ADDR|PORT)|NODE_RANK|(GROUP|ROLE)_.*|TORCHELASTIC_.*|TORCH_NCCL_.*|PYTORCH_.*ALLOC_CONF"
)
"""Environment variables of the trainer's process group, launcher, watchdog and allocator; a server has its own of each.

Under torchrun's `TORCHELASTIC_USE_AGENT_STORE` its store would wait for one that nobody serves.
"""

HERE = "127.0.0.1,localhost"

BESIDE_TRAINER = 0.4
"""`memory_fraction` of a server on a GPU that the trainer uses too."""

Kind = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class Launch:
    """How servers are started.

    Args:
        tensor_parallel: GPUs of one server, over which it shards the model.
        dtype: The weights' type in the engine; `auto` is the type in which the trainer computes. In float32 attention
            is slow on GPUs, since SGLang's kernels take 16 bit.
        memory_fraction: Share of the GPU memory that is free when a server starts, for weights and KV cache; null takes
            0.4 on the trainer's GPUs, and leaves it to SGLang elsewhere.
        release_memory: Give the memory back while the trainer learns, for engines on the trainer's GPUs.
        adapter_only: With LoRA, give servers the base once and then the adapters alone, which they apply themselves;
            they arrive merged otherwise. Running servers need SGLang's `--enable-lora`; requests in flight begin anew.
        args: Further arguments of `python -m sglang.launch_server`.
    """

    tensor_parallel: Count = 1
    dtype: Kind = "auto"
    memory_fraction: ShareBelowOne | None = None
    release_memory: bool = False
    adapter_only: bool = False
    args: Sequence[str] = ()


def release(version: str) -> tuple[int, ...]:
    """Return a release's first three numbers.

    Raises:
        EngineError: rlkit does not know the release.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if not FIRST <= numbers <= LAST:
        first, last = (".".join(map(str, x)) for x in (FIRST, LAST))
        raise EngineError(
            f"SGLang is {version}, but rlkit works with {first} to {last}; install rlkit's: "
            "pip install 'rlkit-fabric[sglang]'"
        )
    return numbers


def require_sglang() -> None:
    """Check that a server can be started here.

    Raises:
        EngineError: SGLang is not installed, or is a release that rlkit does not know.
    """
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise EngineError(
            "sglang is not installed in this environment; install it: pip install 'rlkit-fabric[sglang]', give the "
            "urls of running servers, or choose rollout.engine: TorchEngine"
        ) from None
    release(found)


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on.

    It is below those that the kernel hands out, one of which SGLang's own sockets may get before the server listens.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise EngineError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on 127.0.0.1")


def write_model(folder: Path, policy: Any, stop_ids: frozenset[int]) -> None:
    """Write what a server needs to build the model; its weights come from the trainer."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(policy.config)
    config.architectures = config.architectures or [type(policy).__name__]
    config.save_pretrained(folder)
    if stop_ids and policy.generation_config is not None:
        ends = type(policy.generation_config)(eos_token_id=sorted(stop_ids))
        ends.save_pretrained(folder)


def command(model: Path, port: int, launch: Launch, dtype: str, gpu: int | None) -> list[str]:
    """Return a server's command line without `launch.args`; `gpu` is the index of its first one, None on a CPU."""
    words = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--load-format", "dummy",
        "--skip-tokenizer-init", "--skip-server-warmup", "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype,
        "--tp-size", str(launch.tensor_parallel), "--log-level", "warning",
    ]  # fmt: skip
    if gpu is None:
        words += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--grammar-backend", "none", "--disable-cuda-graph", "--sleep-on-idle", "--max-total-tokens", CPU_TOKENS,
        ]  # fmt: skip
    else:
        words += ["--base-gpu-id", str(gpu)]
        words += ["--attention-backend", "torch_native"] if dtype == "float32" else []  # others take 16 bit only
        words += ["--enable-memory-saver"] if launch.release_memory else []
    if launch.memory_fraction is not None:
        words += ["--mem-fraction-static", str(launch.memory_fraction)]
    return words


def adapter_words(policy: Any, gpu: int | None) -> list[str]:
    """Return the arguments with which a server makes room for a set of adapters like the policy's, and for none.

    Its own health probes have none, and would displace a single set.
    """
    from rlkit.models.lora import adapted

    layers = adapted(policy)
    rank = max(matrix.out_features for layer in layers.values() for matrix in layer.lora_A.values())
    words = ["--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", str(rank)]
    words += ["--lora-backend", "torch_native"] if gpu is None else []
    return [*words, "--lora-target-modules", *sorted(layers)]


def environment(gpu: int | None, hang_seconds: float) -> dict[str, str]:
    """Return a server's environment: the trainer's, but for what is the trainer's own.

    Args:
        gpu: The index of its first GPU; None for a CPU.
        hang_seconds: How long the server may take for a health probe before it calls itself unhealthy.
    """
    found = {name: value for name, value in os.environ.items() if not OF_TRAINERS.fullmatch(name)}
    for name in ("no_proxy", "NO_PROXY"):
        found[name] = ",".join(filter(None, (found.get(name), HERE)))
    found.setdefault("SGLANG_HEALTH_CHECK_TIMEOUT", str(math.ceil(hang_seconds)))
    if gpu is None:
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        found.setdefault("OMP_NUM_THREADS", "1")
    return found


class ServerProcess:
    """A server under its supervisor, on a port of this machine only.

    Args:
        policy: The model that it shall serve.
        stop_ids: What ends a turn.
        launch: How it is started.
        dtype: The weights' type in the engine.
        gpu: The index of its first GPU; None for a CPU.
        hang_seconds: Without a sign of life, after which it counts as dead.
    """

    def __init__(
        self,
        policy: Any,
        stop_ids: frozenset[int],
        launch: Launch,
        dtype: str,
        gpu: int | None,
        *,
        hang_seconds: float = 60.0,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rlkit-sglang-"))
        self.log = self._folder / "server.log"
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        write_model(self._folder / "model", policy, stop_ids)
        self._environment = environment(gpu, hang_seconds)
        self._words = command(self._folder / "model", self._port, launch, dtype, gpu)
        self._words += adapter_words(policy, gpu) if launch.adapter_only else []
        self._words += launch.args

    def start(self) -> None:
        """Start it, or start it again; some time later it answers at `url`."""
        self.kill()
        self._supervisor = subprocess.Popen(
            (sys.executable, "-S", "-E", str(SUPERVISOR), str(self.log), *self._words),
            stdin=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
        )

    @property
    def alive(self) -> bool:
        """Whether the server runs."""
        return self._supervisor is not None and self._supervisor.poll() is None

    def tail(self) -> str:
        """Return the end of its log, and the last exceptions that stand before it."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        raised = [line for line in lines[-1000:-TAIL_LINES] if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return "\n".join([*raised[-3:], *lines[-TAIL_LINES:]])

    def kill(self) -> None:
        """End it at once, with all its children."""
        if self._supervisor is not None:
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.close()
            try:
                self._supervisor.wait(10.0)
            except subprocess.TimeoutExpired:
                self._supervisor.send_signal(signal.SIGKILL)
                self._supervisor.wait()
        self._supervisor = None

    def close(self) -> None:
        """End it and remove its folder."""
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)
