"""Sharding: the strategies of `fabric:`, and functions over sharded models."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins import Precision, environments
from lightning.fabric.strategies import (  # type: ignore[attr-defined]
    STRATEGY_REGISTRY,
    DDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, distribute_tensor

from rlkit import recipe as sections
from rlkit.base.errors import RecipeError
from rlkit.base.garbage import reuse_memory
from rlkit.distributed.expert_parallel import distribute_experts
from rlkit.distributed.kernels import choose_kernels
from rlkit.distributed.tensor_parallel import divide

DEADLINE = timedelta(seconds=1800)


class ShardOptions(TypedDict):
    """Options of `fully_shard`."""

    offload_policy: OffloadPolicy
    mp_policy: MixedPrecisionPolicy


class FSDP2Strategy(ModelParallelStrategy):
    """Shards parameters, gradients and optimizer state over all ranks or each group; with tensor parallelism, matrices.

    The mesh has the dimensions `data_parallel`, over which parameters are sharded, and `tensor_parallel`. With sequence
    parallelism, neighbours along `data_parallel` have the same rows.

    Args:
        options: The recipe's strategy; its degrees of parallelism must divide the number of ranks.
        timeout: Timeout of collectives.
    """

    rows_mesh: DeviceMesh
    """[data, copies]: ranks along `data` have rows of their own, those along `copies` the same rows."""
    sequence_mesh: DeviceMesh | None = None
    """The ranks that share the tokens of the same rows; None without sequence parallelism."""

    def __init__(self, options: sections.FSDP2 | None = None, timeout: timedelta = DEADLINE) -> None:
        super().__init__(self._parallelize, process_group_backend=backend(), timeout=timeout)
        options = options or sections.FSDP2()
        self.tensor_parallel = options.tensor_parallel
        self.sequence_parallel = options.sequence_parallel
        self.expert_parallel = options.expert_parallel
        self.replicate = options.replicate
        self.offload = options.offload
        self._replicated_mesh: DeviceMesh | None = None
        self._experts_mesh: DeviceMesh | None = None

    def require_divisors(self) -> None:
        """Refuse degrees of parallelism that do not divide the number of ranks.

        Raises:
            RecipeError: One does not.
        """
        ranks, beside = self.num_nodes * self.num_processes, ""
        for name in ("tensor_parallel", "sequence_parallel", "expert_parallel", "replicate"):
            size = getattr(self, name)
            if ranks % size:
                divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
                choice = f"the {ranks} ranks{beside}; choose one of {divisors}"
                raise RecipeError(f"FSDP2 has {name}={size}, which does not divide {choice}")
            if name == "tensor_parallel" and size > 1:
                ranks, beside = ranks // size, f" that {name}={size} leaves"

    def setup_environment(self) -> None:
        """Create the process group and the meshes."""
        world = self.num_nodes * self.num_processes
        self._tensor_parallel_size = self.tensor_parallel
        self._data_parallel_size = world // self.tensor_parallel
        super().setup_environment()
        self.rows_mesh = self.device_mesh
        kind = self.root_device.type
        if self.sequence_parallel > 1:
            copies = self.tensor_parallel * self.sequence_parallel
            shape = (world // copies, self.sequence_parallel, self.tensor_parallel)
            names = ("data", "sequence", "tensor")
            self.sequence_mesh = init_device_mesh(kind, shape, mesh_dim_names=names)["sequence"]
            self.rows_mesh = init_device_mesh(kind, (world // copies, copies), mesh_dim_names=("data", "copies"))
        if self.replicate > 1:
            shape = (self.replicate, self._data_parallel_size // self.replicate, self.tensor_parallel)
            names = ("dp_replicate", "dp_shard", "tensor_parallel")
            self._replicated_mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        if self.expert_parallel > 1:
            sizes = (world // self.expert_parallel, self.expert_parallel)
            self._experts_mesh = init_device_mesh(kind, sizes, mesh_dim_names=("copies", "experts"))

    def _parallelize(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        mesh = self._replicated_mesh or mesh
        half = torch.bfloat16 if self.precision.precision == "bf16-mixed" else None
        options: ShardOptions = {
            "offload_policy": CPUOffloadPolicy(torch.cuda.is_available()) if self.offload else OffloadPolicy(),
            "mp_policy": MixedPrecisionPolicy(half, reduce_dtype=torch.float32, cast_forward_inputs=False),
        }
        if mesh.size() == 1:
            return parallelize(module, mesh, options)
        weights = _take_weights(module)
        if self._experts_mesh is not None:
            group, alone = self._experts_mesh["experts"], mesh["tensor_parallel"]  # of one rank: a recipe has either
            for experts in distribute_experts(_text_model(module), _config(module), group, alone):
                _shard_experts(experts, self._experts_mesh, options)
        parallelize(module, mesh, options)
        module.to_empty(device=torch.device("cpu") if self.offload else self.root_device)
        _fill(module, weights, self.root_device)
        return module


class HalfWeights(Precision):
    """Keeps weights in bfloat16, without casting inputs or outputs.

    Args:
        trained: Whether to round trained weights too, which are float32 otherwise. Heads with one output stay float32:
            scores and values are compared with small differences.
    """

    precision = "bf16-true"  # type: ignore[assignment]

    def __init__(self, trained: bool) -> None:
        self.trained = trained

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Round the weights but not the buffers: the rotary frequencies stay float32."""
        for parameter in module.parameters():
            rounded = not parameter.requires_grad or (self.trained and parameter.shape[:1] != (1,))
            if rounded and parameter.is_floating_point():
                parameter.data = parameter.data.to(torch.bfloat16)
        return module


def parallelize(module: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Shard a transformer in place: its matrices by tensor parallelism, then its blocks, then all other parameters.

    The last dimension of the mesh is that of tensor parallelism; those before it are of size [ranks], or of size
    [groups, ranks of a group] to replicate the shards in each group (HSDP: Zhao et al. 2023, arXiv:2304.11277).
    `options` are those of `fully_shard`. The methods in `module.forward_methods` gather weights as `forward` does.
    """
    assert mesh.mesh_dim_names is not None
    data, tensor = mesh[mesh.mesh_dim_names[:-1]], mesh["tensor_parallel"]
    if tensor.size() > 1:
        divide(_text_model(module), _config(module), tensor)
    for block in blocks(module):
        fully_shard(block, mesh=data, **options)
    # reshard the root's own parameters too, which would otherwise stay unsharded after a forward pass
    fully_shard(module, mesh=data, **options, reshard_after_forward=True)
    for method in getattr(module, "forward_methods", ()):
        register_fsdp_forward_method(module, method)
    return module


def _shard_experts(experts: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> None:
    """Shard experts over the ranks that have the same ones, and average their gradients over all ranks' tokens."""
    copies = mesh["copies"]
    shard = fully_shard(experts, mesh=copies, **options)
    shard.set_gradient_divide_factor(float(mesh.size()))
    if copies.size() > 1:  # with one, torch would divide twice
        shard.set_force_sum_reduction_for_comms(True)  # gloo multiplies nothing before it sums


def _take_weights(module: nn.Module) -> dict[str, Tensor]:
    """Move a module to the meta device; return its weights and buffers by name on the first rank, else none."""
    weights = {}
    if dist.get_rank() == 0:
        weights = {name: x.detach() for name, x in (*module.named_parameters(), *module.named_buffers())}
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # else tied weights would be separated
    try:
        module.to("meta")
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
    return weights


@torch.no_grad()
def _fill(module: nn.Module, weights: dict[str, Tensor], device: torch.device) -> None:
    """Fill a sharded module from the first rank, tensor by tensor; all ranks must call this."""
    for name, target in (*module.named_parameters(), *module.named_buffers()):
        if dist.get_rank() == 0:
            full = weights.pop(name).to(device)
        else:
            full = torch.empty(target.shape, dtype=target.dtype, device=device)
        dist.broadcast(full, 0)
        if isinstance(target, DTensor):
            shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(shard.to_local())
        else:
            target.copy_(full)


def blocks(module: nn.Module) -> list[nn.Module]:
    """Return the transformer's layers, found by the class names in its model's `_no_split_modules`.

    Those of a vision tower are left out: ranks whose rows have no pictures do not call them.
    """
    names = {n for m in module.modules() for n in (getattr(m, "_no_split_modules", None) or ())}
    # fully_shard replaces the class of a sharded module by a subclass
    return [m for m in _text_model(module).modules() if names & {cls.__name__ for cls in type(m).__mro__}]


def _config(module: nn.Module) -> object:
    """Return the configuration of the first model of transformers inside a module."""
    return next(m.config for m in module.modules() if hasattr(m, "config"))


def _text_model(module: nn.Module) -> nn.Module:
    """Return the text model inside a module with a vision-language model; any other module itself."""
    model: Any = next((m for m in module.modules() if hasattr(getattr(m, "config", None), "vision_config")), None)
    return module if model is None else model.get_decoder()  # type: ignore[no-any-return]


def checkpoint_activations(module: nn.Module) -> None:
    """Recompute each block's activations in the backward pass, instead of storing them."""
    for block in blocks(module):
        checkpoint(block)


def backend() -> str:
    """Return the process group's backend, with collectives on the CPU in addition to those on GPUs."""
    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def make_fabric(
    section: sections.Fabric, deadline: float = DEADLINE.total_seconds(), *, trains_bfloat16: bool = False
) -> Fabric:
    """Return Fabric for the recipe's `fabric:`; also choose this process's kernels and memory allocator settings.

    Args:
        section: The recipe's `fabric:`.
        deadline: Timeout of collectives in seconds.
        trains_bfloat16: Whether `bf16-true` holds for trained weights too.

    Raises:
        RecipeError: This machine has no such devices, or cannot start the processes.
    """
    choose_kernels()
    reuse_memory()
    timeout = timedelta(seconds=deadline)
    # by name: with strategy auto, Fabric looks up "ddp" here; this replaces Lightning's own in the whole process
    STRATEGY_REGISTRY.register("fsdp2", FSDP2Strategy, override=True, timeout=timeout)
    STRATEGY_REGISTRY.register(
        "ddp", DDPStrategy, override=True, process_group_backend=backend(), timeout=timeout, start_method="popen"
    )
    strategy = section.strategy
    half = section.precision == "bf16-true"
    assert section.precision != "auto", "chosen with the recipe"
    try:
        plugins: list[Any] = [getattr(environments, name)() for name in section.plugins or ()]
        with _without_notes():
            fabric = Fabric(
                accelerator=section.accelerator,
                devices=section.devices,
                num_nodes=section.num_nodes,
                strategy=strategy if isinstance(strategy, str) else FSDP2Strategy(strategy, timeout),
                precision=None if half else section.precision,  # Fabric's bf16-true would round buffers too
                plugins=[*plugins, HalfWeights(trains_bfloat16)] if half else plugins,
            )
    except (ValueError, TypeError, RuntimeError, ModuleNotFoundError) as error:
        raise RecipeError(f"fabric: {error}") from error
    fabric.launch = _without_notes()(fabric.launch)  # type: ignore[method-assign]
    if isinstance(fabric.strategy, FSDP2Strategy):
        fabric.strategy.require_divisors()
    if not isinstance(fabric.strategy, SingleDeviceStrategy | DDPStrategy | FSDP2Strategy):
        raise RecipeError(
            f"fabric: this environment selects {type(fabric.strategy).__name__}, which rlkit does not support; set "
            "fabric.accelerator and fabric.strategy"
        )
    return fabric


@contextmanager
def _without_notes() -> Iterator[None]:
    """Leave out Lightning's notes: on mixed precision, tensor cores and ranks, and on SLURM that is not used."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The `srun` command is available")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor; all its ranks must call this if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor()


@contextmanager
def unsharded(module: nn.Module) -> Iterator[None]:
    """Keep the full weights on every rank in this context, so that submodules can be called without collectives."""
    shards = [m for m in module.modules() if isinstance(m, FSDPModule)]
    for shard in shards:
        shard.set_reshard_after_forward(False, recurse=False)
        shard.unshard()
    try:
        yield
    finally:
        for shard in shards:
            shard.set_reshard_after_forward(True, recurse=False)
            shard.reshard()


def accumulating(fabric: Fabric, module: Any, more: bool) -> AbstractContextManager[None]:
    """Defer the reduction of gradients in this context if `more` micro-batches follow.

    FSDP2 reduces gradients in every backward pass, since each rank would otherwise hold those of the full model.
    """
    return fabric.no_backward_sync(module, enabled=more and not isinstance(fabric.strategy, FSDP2Strategy))


def clip(fabric: Fabric, module: nn.Module, optimizer: torch.optim.Optimizer, max_grad_norm: float) -> Tensor:
    """Clip the gradients to a norm over all ranks; return the norm before clipping, which may not be finite."""
    if not isinstance(fabric.strategy, FSDP2Strategy):
        norm = fabric.clip_gradients(module, optimizer, max_norm=max_grad_norm, error_if_nonfinite=False)
        assert norm is not None
        return norm
    grads = [p.grad for p in module.parameters() if p.grad is not None]
    # agreed: the modules are the same on every rank
    norms = [full_tensor(torch.nn.utils.get_total_norm(group)) for group in by_mesh(grads)]
    norm = torch.stack([n.to(fabric.device) for n in norms]).square().sum().sqrt()
    for grad in grads:
        grad.mul_((max_grad_norm / (norm + 1e-6)).clamp(max=1.0).to(grad.device))
    return norm


def by_mesh(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors by device mesh, since an operation takes tensors of one mesh only."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(groups.values())
