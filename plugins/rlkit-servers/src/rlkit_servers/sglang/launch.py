"""How SGLang is started: its supported releases, its command line, its environment."""

from __future__ import annotations

import math
import os
import re
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from packaging.requirements import Requirement

from rlkit.base.errors import EngineError
from rlkit.base.installed import extra_command
from rlkit.interfaces.launcher import ServerSite
from rlkit_servers.launched import ServerLaunch
from rlkit_servers.transports import is_local

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM

FIRST, LAST = (0, 5, 17), (0, 5, 23)
"""The first and last release that rlkit is tested with."""

FOR_TORCH = {"2.11": "0.5.17", "2.13": "0.5.21"}
"""The newest release for each torch that rlkit supports; there is none for 2.12, and all are built for CUDA 13."""

SHOWN = 4
"""Packages that a message names."""

CPU_TOKENS = "65536"
"""Tokens of KV cache on a CPU, where SGLang would otherwise take most of the memory."""

BESIDE_TRAINER = 0.4
"""`memory_fraction` of a server on a GPU that the trainer uses too."""

KEY_FILE = "key.yaml"
"""The file with the key of a server that other machines can reach; its command line is visible to all users there."""


class Launch(ServerLaunch):
    """How servers are started.

    Args:
        tensor_parallel: GPUs of one server, over which it shards the model.
        dtype: The weights' dtype in the engine; `auto` for the dtype in which the trainer computes. In float32,
            attention is slow on GPUs, since SGLang's kernels need 16 bits.
        memory_fraction: Share of the GPU memory, of what is free when a server starts, for weights and KV cache; null
            for 0.4 on the trainer's GPUs, and for SGLang's choice elsewhere.
        release_memory: Release the memory while the trainer learns, for engines on the trainer's GPUs.
        adapter_only: With LoRA, push the base to servers once and then the adapters alone, which servers apply;
            otherwise weights arrive merged. Running servers need SGLang's `--enable-lora`; requests in flight start
            over.
        structures: Start servers with the policy's tokenizer and llguidance, for `rollout.sampling.structure`. Running
            servers need `--grammar-backend llguidance`, and a tokenizer.
        args: Additional arguments of `python -m sglang.launch_server`.
    """


def release(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version.

    Raises:
        EngineError: The release is not supported.
    """
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:3])
    if not FIRST <= numbers <= LAST:
        first, last = (".".join(map(str, x)) for x in (FIRST, LAST))
        raise EngineError(
            f"SGLang is {version}, but rlkit works with {first} to {last}; install a supported release: "
            f"{install_command()}"
        )
    return numbers


def require_sglang() -> None:
    """Check that a server can be started here.

    Raises:
        EngineError: SGLang is not installed, or its release is not supported.
    """
    try:
        version = metadata.version("sglang")
    except metadata.PackageNotFoundError:
        raise EngineError(
            f"sglang is not installed in this environment: {install_command()}, set the urls of running servers, "
            "or choose rollout.engine: TorchEngine"
        ) from None
    release(version)


def install_command() -> str:
    """Return the command that installs the release for the torch and CUDA that are here, for messages."""
    if not torch.cuda.is_available():
        return extra_command("sglang")
    fitting = FOR_TORCH.get(".".join(torch.__version__.split(".")[:2]))
    if fitting and (torch.version.cuda or "").startswith("13."):
        return f"pip install sglang=={fitting}"
    supported = [f"{release} for torch {minor}" for minor, release in FOR_TORCH.items()]
    return (
        f"pip install sglang=={FOR_TORCH['2.13']} in a new environment, since no release is for torch "
        f"{torch.__version__} (all need CUDA 13 and a driver from 580 on: {', '.join(supported)})"
    )


def describe_installation(version: str) -> str:
    """Return an installed version of SGLang with what it lacks, or, for "", how it is installed."""
    offline = "; without a network: rlkit docs bare-images" if torch.cuda.is_available() else ""
    if not version:
        return f"not installed ({install_command()}{offline})"
    try:
        release(version)
    except EngineError as error:
        return str(error)
    if not torch.cuda.is_available():
        return version
    packed = is_packed()
    lacking = unmet_requirements(may_miss=packed)
    more = f" and {len(lacking) - SHOWN} more" if len(lacking) > SHOWN else ""
    description = f"{version}, packed for dense text models" if packed else version
    problem = f", without {', '.join(lacking[:SHOWN])}{more} ({install_command()}{offline})"
    return description + (problem if lacking else "")


def is_packed() -> bool:
    """Whether SGLang lacks FlashAttention's and FlashInfer's kernels, as in an archive of `pack/pack.py`."""
    kernels = find_spec("sgl_kernel")
    folders = kernels.submodule_search_locations if kernels is not None else None
    return bool(folders) and not any(next(Path(folder).glob("flash_ops*"), None) for folder in folders or ())


def unmet_requirements(may_miss: bool) -> list[str]:
    """Return the requirements of the installed SGLang that are not met, with the version that is there instead.

    Args:
        may_miss: Whether packages may be missing.
    """
    unmet = []
    for requirement in map(Requirement, metadata.requires("sglang") or ()):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        requirement.extras = set()
        try:
            version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            unmet += [] if may_miss else [str(requirement)]
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"{requirement} (but {version})")
    return unmet


def command(site: ServerSite, launch: Launch, dtype: str) -> list[str]:
    """Return a server's command line without `launch.args`, for the model in the folder `model` of the site."""
    words = [
        site.python, "-m", "sglang.launch_server", "--model-path", str(site.folder / "model"), "--load-format", "dummy",
        "--skip-server-warmup", "--host", site.host, "--port", str(site.port),
        "--dtype", dtype, "--tp-size", str(launch.tensor_parallel), "--log-level", "warning",
    ]  # fmt: skip
    words += ["--grammar-backend", "llguidance"] if launch.structures else ["--skip-tokenizer-init"]
    if site.first_gpu is None:
        words += [
            "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
            "--disable-cuda-graph", "--sleep-on-idle", "--max-total-tokens", CPU_TOKENS,
        ]  # fmt: skip
        words += [] if launch.structures else ["--grammar-backend", "none"]
    else:
        words += ["--base-gpu-id", str(site.first_gpu)]
        if dtype == "float32":  # other backends need 16 bits
            words += ["--attention-backend", "torch_native"]
        elif is_packed():
            words += ["--attention-backend", "triton"]
        words += ["--enable-memory-saver"] if launch.release_memory else []
    if not is_local(site.host):
        words += ["--config", str(site.folder / KEY_FILE)]
    if launch.memory_fraction is not None:
        words += ["--mem-fraction-static", str(launch.memory_fraction)]
    return words


def adapter_arguments(policy: CausalLM, gpu: int | None) -> list[str]:
    """Return the arguments that make room for a set of adapters like the policy's, and for requests without adapters.

    A server's own health checks are such requests, and would displace a single set.
    """
    from rlkit.models.lora import adapted_layers

    layers = adapted_layers(policy)
    rank = max(matrix.out_features for layer in layers.values() for matrix in layer.lora_A.values())
    words = ["--enable-lora", "--max-loras-per-batch", "2", "--max-lora-rank", str(rank)]
    words += ["--lora-backend", "torch_native"] if gpu is None else []
    return [*words, "--lora-target-modules", *sorted(layers)]


def environment(gpu: int | None, hang_seconds: float) -> dict[str, str]:
    """Return a server's environment variables beside those of its node; variables of this process take precedence.

    Args:
        gpu: The index of the server's first GPU; None for a CPU.
        hang_seconds: Time after which a health check counts as failed.
    """
    defaults = {"SGLANG_HEALTH_CHECK_TIMEOUT": str(math.ceil(hang_seconds))}
    if gpu is None:
        defaults["OMP_NUM_THREADS"] = "1"
    elif is_packed():
        defaults["SGLANG_IS_FLASHINFER_AVAILABLE"] = "false"
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return variables | ({"SGLANG_USE_CPU_ENGINE": "1"} if gpu is None else {})
