"""Processes, devices, precision and sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlkit.base.ranges import Count, NonNegativeInt


@dataclass
class FSDP2:
    """The strategy that shards parameters, gradients and optimizer states over all ranks.

    Args:
        tensor_parallel: Ranks that share each matrix product; the others are data-parallel. Must divide the ranks.
        sequence_parallel: Ranks that share the tokens of each row, for long rows; in attention they share its heads,
            which are padded to a multiple of it (DeepSpeed-Ulysses, arXiv:2309.14509). Must divide the ranks.
        offload: Keep parameters and optimizer states in host memory between uses.
        replicate: Groups of ranks that each hold all shards, such as one for each node; only gradients are exchanged
            between groups. Times `tensor_parallel`, it must divide the ranks. 1 shards over all ranks.
        expert_parallel: Ranks that share the experts of each layer of a mixture: tokens travel to the experts of their
            routes, and no rank gathers the others' experts. Must divide the ranks; not with `tensor_parallel` or
            `replicate`.
    """

    tensor_parallel: Count = 1
    sequence_parallel: Count = 1
    offload: bool = False
    replicate: Count = 1
    expert_parallel: Count = 1


Environment = Literal[
    "LightningEnvironment", "LSFEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"
]
"""Lightning Fabric's classes for launchers of processes."""


@dataclass
class Fabric:
    """Options of Lightning Fabric: devices, strategy and precision.

    Args:
        accelerator: The kind of device; `auto` is a GPU if there is one.
        devices: The number of devices per node, or their indices.
        num_nodes: Number of nodes.
        strategy: How ranks share the work: `ddp` replicates the model; `fsdp2` shards it, and so does `FSDP2`, which
            has options; `auto` is `ddp` on several devices.
        precision: The precision of computations. Trained weights are float32, except with `bf16-true`: it is for frozen
            weights under adapters, and for `train.optimizer: AdamW8bit`, which trains weights in bfloat16. `32-true`
            is float32 on GPUs too: TF32 is off. `auto` is `bf16-mixed` on GPUs that have bfloat16 and on CPUs for which
            `lscpu` lists `avx512_bf16` or `amx_bf16`, else `32-true`.
        plugins: The cluster environment, if Fabric does not detect it.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Literal["auto"] | Count | list[NonNegativeInt] = "auto"
    num_nodes: Count = 1
    strategy: Literal["auto", "ddp", "fsdp2"] | FSDP2 = "auto"
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true", "auto"] = "32-true"
    plugins: list[Environment] | None = None

    @property
    def sequence_parallel(self) -> int:
        """The number of ranks that share the tokens of each row."""
        return self.strategy.sequence_parallel if isinstance(self.strategy, FSDP2) else 1

    @property
    def shards(self) -> bool:
        """Whether a rank holds only shards of the weights."""
        return self.strategy == "fsdp2" or isinstance(self.strategy, FSDP2)
