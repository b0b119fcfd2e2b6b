"""Tensor parallelism: the matrices of a model, and its experts, divided over ranks as the model's own plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map

from rlkit.base.errors import RecipeError

T = TypeVar("T")

MATRICES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "rowwise_split_input": lambda: RowwiseParallel(input_layouts=Replicate()),
}
"""How a linear layer is divided, by its style in transformers' plans."""

STACKED = 2
PACKED = _StridedShard(1, split_factor=STACKED)
"""The placement of two matrices that stand one above the other: a part of each."""

EXPERTS: dict[str, Placement] = {
    "colwise": Shard(1),
    "packed_colwise": PACKED,
    "rowwise": Shard(2),
}
"""How the matrices of experts, [experts, out, in], are divided."""

SUMMED = "replicated_with_grad_allreduce"
"""The style of weights that all ranks have and each applies to its own heads."""

ALL_EXPERTS = "moe_tp_experts"
EMBEDDING = "embedding_rowwise"
"""The style that is ignored: it would save memory alone."""

HEADS = ("k_proj", "qkv_proj", "query_key_value")
"""Ends of the names of layers whose output is divided by heads."""


def plan_of(config: Any, size: int) -> Mapping[str, str]:
    """Return transformers' plan for a kind of model: styles by patterns of names of modules and parameters.

    Args:
        config: Of a model of transformers.
        size: Ranks that share each matrix.

    Raises:
        RecipeError: There is no plan, it has other styles, or a size of the model is not divisible.
    """
    config = config.get_text_config()
    complete: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    plan = {pattern: style for pattern, style in complete.items() if style != EMBEDDING}
    setting, styles = f"FSDP2 has tensor_parallel={size}, but", set(plan.values())
    if not styles:
        raise RecipeError(
            f"{setting} transformers has no plan for model.path, a {config.model_type!r}; set tensor_parallel: 1"
        )
    unknown = styles - {*MATRICES, *EXPERTS, SUMMED, ALL_EXPERTS}
    if unknown:
        raise RecipeError(
            f"{setting} the plan for model.path, a {config.model_type!r}, has {', '.join(sorted(unknown))}, which "
            "rlkit does not divide; set tensor_parallel: 1"
        )
    sizes: list[str] = []
    if any(pattern.endswith(HEADS) and style == "colwise" for pattern, style in plan.items()):
        sizes += ["num_attention_heads", "num_key_value_heads", "num_global_key_value_heads"]
    if ALL_EXPERTS in styles:
        sizes += ["moe_intermediate_size"] if hasattr(config, "moe_intermediate_size") else ["intermediate_size"]
    for option in sizes:
        if (getattr(config, option, None) or 0) % size:
            raise RecipeError(f"{setting} model.path has {option}={getattr(config, option)}; choose a divisor of it")
    return plan


def divide(model: nn.Module, config: Any, mesh: DeviceMesh) -> None:
    """Divide the matrices of a text model in place, as `plan_of` says.

    Args:
        model: The text model, with or without adapters on its linear layers.
        config: Its configuration.
        mesh: Of one dimension, over which matrices are divided.

    Raises:
        RecipeError: There is no such plan, it reaches no layer of this model, or experts have adapters.
    """
    plan = plan_of(config, mesh.size())
    styled = [(name, layer, style_of(plan, name)) for name, layer in model.named_modules()]
    if not any(style for _, _, style in styled):
        raise RecipeError(
            f"FSDP2 has tensor_parallel={mesh.size()}, but transformers' plan for this model divides none of its "
            "layers; set tensor_parallel: 1"
        )
    for name, layer, style in styled:
        if style == SUMMED:
            _change_weights(layer, lambda weight: _summed(weight, mesh))
        elif style == ALL_EXPERTS:
            _divide_experts(layer, {n: style_of(plan, f"{name}.{n}") for n, _ in layer.named_parameters()}, mesh)
        elif style in MATRICES:
            _divide_layer(layer, style, mesh)


def style_of(plan: Mapping[str, str], name: str) -> str:
    """Return the style of a module or parameter; none is the empty one."""
    matches = (style for pattern, style in plan.items() if fnmatch(name, pattern) or fnmatch(name, f"*.{pattern}"))
    return next(matches, "")


def _divide_layer(linear: nn.Module, style: str, mesh: DeviceMesh) -> None:
    """Shard a linear layer; if it has adapters, the layer and the adapter matrix on the sharded side."""
    layers = [linear]
    if hasattr(linear, "base_layer"):
        adapters = linear.lora_B if style.startswith("colwise") else linear.lora_A
        layers = [linear.base_layer, *adapters.values()]  # type: ignore[list-item,union-attr,operator]
    for layer in layers:
        parallelize_module(layer, mesh, MATRICES[style]())


def _divide_experts(experts: nn.Module, styles: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Divide the inner width of each expert; the outputs of all ranks are summed.

    Raises:
        RecipeError: The plan leaves a parameter out, or the experts have adapters.
    """
    if hasattr(experts, "base_layer"):
        raise RecipeError(
            f"FSDP2 has tensor_parallel={mesh.size()}, which does not divide adapters of experts; set "
            "tensor_parallel: 1, or name the layers in model.lora.targets"
        )
    for name, parameter in list(experts.named_parameters()):
        if styles[name] not in EXPERTS:
            raise RecipeError(
                f"FSDP2 has tensor_parallel={mesh.size()}, but transformers' plan for this model does not say how "
                f"{name} of experts is divided; set tensor_parallel: 1"
            )
        divided = distribute_tensor(parameter, mesh, [EXPERTS[styles[name]]])
        experts.register_parameter(name, nn.Parameter(divided, parameter.requires_grad))
    forward = experts.forward

    def sum_outputs(*inputs: object, **options: object) -> Tensor:
        equal_inputs, equal_options = tree_map(lambda x: _summed(x, mesh), (inputs, options))
        output = DTensor.from_local(forward(*equal_inputs, **equal_options), mesh, [Partial()], run_check=False)
        return output.redistribute(placements=[Replicate()]).to_local()

    experts.forward = sum_outputs
    _change_weights(experts, lambda weight: weight.to_local())  # type: ignore[attr-defined]


def _summed(value: T, mesh: DeviceMesh) -> T:
    """Return a tensor that is equal on all ranks, so that their gradients are summed; any other value as it is."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    summed: Any = DTensor.from_local(value, mesh, [Replicate()], run_check=False).to_local(grad_placements=[Partial()])
    return summed  # type: ignore[no-any-return]


def _change_weights(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Let a module compute with a function of its own weights, as they are when it is called."""
    forward = module.forward

    def changed(*inputs: object, **options: object) -> object:
        weights = dict(module._parameters)
        module._parameters.update({name: change(w) for name, w in weights.items() if w is not None})  # type: ignore[misc]
        try:
            return forward(*inputs, **options)
        finally:
            module._parameters.update(weights)

    module.forward = changed
