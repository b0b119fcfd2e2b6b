"""How SGLang is started: its releases, its command line, its environment."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Literal

from rlkit.engines.server.process import server_environment
from rlkit.errors import EngineError
from rlkit.names import USER_ONLY
from rlkit.ranges import Count, ShareBelowOne

FIRST, LAST = (0, 5, 17), (0, 5, 23)
"""The releases that rlkit's tests drive lie between these."""

CPU_TOKENS = "65536"
"""Tokens of KV cache on a CPU, where SGLang would take most of the memory otherwise."""

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
        release_memory: Release the memory while the trainer learns, for engines on the trainer's GPUs.
        adapter_only: With LoRA, push the base to servers once and then the adapters alone, which they apply themselves;
            they arrive merged otherwise. Running servers need SGLang's `--enable-lora`; requests in flight start over.
        args: Further arguments of `python -m sglang.launch_server`.
    """

    tensor_parallel: Count = 1
    dtype: Kind = "auto"
    memory_fraction: ShareBelowOne | None = None
    release_memory: bool = False
    adapter_only: bool = False
    args: Annotated[Sequence[str], USER_ONLY] = ()


def release(version: str) -> tuple[int, ...]:
    """Return a release's first three numbers.

    Raises:
        EngineError: The release is not supported.
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
        EngineError: SGLang is not installed, or its release is not supported.
    """
    try:
        found = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise EngineError(
            "sglang is not installed in this environment; install it: pip install 'rlkit-fabric[sglang]', set the "
            "urls of running servers, or choose rollout.engine: TorchEngine"
        ) from None
    release(found)


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
    from rlkit.models.lora import adapted_layers

    layers = adapted_layers(policy)
    rank = max(matrix.out_features for layer in layers.values() for matrix in layer.lora_A.values())
    words = ["--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", str(rank)]
    words += ["--lora-backend", "torch_native"] if gpu is None else []
    return [*words, "--lora-target-modules", *sorted(layers)]


def environment(gpu: int | None, hang_seconds: float) -> dict[str, str]:
    """Return a server's environment.

    Args:
        gpu: The index of its first GPU; None for a CPU.
        hang_seconds: How long the server may take for a health probe before it calls itself unhealthy.
    """
    found = server_environment()
    found.setdefault("SGLANG_HEALTH_CHECK_TIMEOUT", str(math.ceil(hang_seconds)))
    if gpu is None:
        found["SGLANG_USE_CPU_ENGINE"] = "1"
        found.setdefault("OMP_NUM_THREADS", "1")
    return found
