"""Low-rank adapters, through peft."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlkit.base.errors import RecipeError
from rlkit.distributed.fsdp2 import full_tensor
from rlkit.models.source import MAGNITUDES
from rlkit.ops.quantization import QuantizedLinear, replace_layers
from rlkit.recipe import Lora
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from rlkit.interfaces.model import AdapterLayer, CausalLM, Magnitudes


HEAD = ".modules_to_save."
"""The infix of peft between the name of a fully trained layer and that of its adapter."""


def add_lora(
    policy: CausalLM,
    lora: Lora,
    seed: int = 0,
    base: str | None = None,
    task: str = "CAUSAL_LM",
    *,
    patterns: JsonObject | None = None,
) -> CausalLM:
    """Freeze a model and add adapters in float32 to train, the same on every rank.

    Args:
        policy: The model.
        lora: The shape of the adapters.
        seed: Seed of their initial values.
        base: The model's name or folder, which saved adapters record; None for the model's own record.
        task: peft's task type of the model.
        patterns: peft's `rank_pattern` and `alpha_pattern` of a saved adapter.

    Raises:
        RecipeError: A target names no module, or peft gives it no adapter.
    """
    from peft import LoraConfig, get_peft_model

    modules, parameters = find_targets(policy, lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=modules,
        target_parameters=parameters or None,
        task_type=task,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        **(patterns or {}),
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            # peft compares them with the names of modules, and they are those of parameters
            warnings.filterwarnings("ignore", message="The following (rank|alpha)_pattern keys did not match")
            torch.manual_seed(seed)
            adapted: CausalLM = get_peft_model(policy, config)
    except ValueError as error:
        weighted = {name.rpartition(".")[2] for name, module in policy.named_modules() if hasattr(module, "weight")}
        names = sorted(weighted)
        raise RecipeError(f"model.lora.targets is {lora.targets!r}: {error}. Modules: {', '.join(names)}") from error
    _start_magnitudes(adapted)
    if base is not None:
        adapted.peft_config[adapted.active_adapter].base_model_name_or_path = base
    adapted.eval()
    return adapted


def find_targets(policy: CausalLM, targets: str | list[str]) -> tuple[str | list[str], list[str]]:
    """Return the modules and the parameters, such as those of experts, that get adapters.

    `all-linear` leaves out layers of state-space mixers whose kernels read the weight past its adapter.
    """
    if isinstance(targets, str):
        modules = dict(policy.named_modules())
        mixers = [name for name, module in modules.items() if hasattr(module, "A_log") and hasattr(module, "D")]
        unread = modules.keys() & {f"{mixer}.{layer}" for mixer in mixers for layer in ("out_proj", "dt_proj")}
        if targets != "all-linear" or not unread:
            return targets, []
        heads = [score_head(policy), policy.get_output_embeddings()]
        names = {n for n, x in modules.items() if isinstance(x, nn.Linear) and all(x is not head for head in heads)}
        return sorted(names - unread), []
    names = {name for name, _ in policy.named_parameters()}
    parameters = [target for target in targets if any(f".{name}".endswith(f".{target}") for name in names)]
    return [target for target in targets if target not in parameters], parameters


@torch.no_grad()
def _start_magnitudes(policy: CausalLM) -> None:
    """Let DoRA start as the base: peft rounds the norms of a base in bfloat16."""
    for layer in adapter_layers(policy):
        for magnitudes in layer.lora_magnitude_vector.values():
            norms = _norms(layer.get_base_layer().weight.float(), magnitudes)
            magnitudes.weight.copy_(norms.view_as(magnitudes.weight))


def load_adapter(policy: CausalLM, file: Path) -> None:
    """Load the adapters' values from safetensors, in place.

    Raises:
        RecipeError: The file cannot be read, or its tensors do not match these adapters.
    """
    from safetensors.torch import load_file

    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{file} cannot be read: {error}") from error
    own = dict(adapter_tensors(policy))
    for name in sorted(own.keys() | saved.keys()):
        actual, expected = (list(x[name].shape) if name in x else "none" for x in (saved, own))
        if actual != expected:
            raise RecipeError(
                f"{file} does not fit model.lora and its base: {name} is {actual} there, expected {expected}; set "
                "model.lora.targets as when it was trained, and see base_model_name_or_path in adapter_config.json"
            )
        if not saved[name].is_floating_point() or not saved[name].isfinite().all():
            raise RecipeError(f"{file} has numbers in {name} that are not finite; it is damaged, or training failed")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def load_by_peft(policy: CausalLM, folder: Path) -> CausalLM:
    """Return a model with a saved adapter, as peft alone loads it."""
    from peft import PeftModel

    adapted: CausalLM = PeftModel.from_pretrained(policy, folder)  # type: ignore[arg-type]
    return adapted


def has_lora(policy: CausalLM) -> bool:
    """Whether the policy has adapters."""
    return hasattr(policy, "peft_config")


def frozen_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that are not trained, under their names without adapters."""
    return {plain_name(name): weight for name, weight in model.named_parameters() if not weight.requires_grad}


@torch.no_grad()
def share_frozen(weights: Mapping[str, nn.Parameter], others: Mapping[str, nn.Parameter]) -> None:
    """Hold weights that two models have in common once: where others are equal, they become the same tensors."""
    for name, other in others.items():
        weight = weights.get(name)
        if weight is not None and weight.dtype == other.dtype and torch.equal(weight.to(other.device), other):
            other.data = weight.data


def base_model(policy: CausalLM) -> CausalLM:
    """Return the Hugging Face model itself, including adapters in its layers."""
    return policy.get_base_model() if hasattr(policy, "get_base_model") else policy  # peft marks the model itself too


def score_head(policy: CausalLM) -> nn.Linear | None:
    """Return a sequence classifier's layer from hidden states to scores; None for other models."""
    return getattr(base_model(policy), "score", None)


def adapters_off(policy: CausalLM) -> AbstractContextManager[None]:
    """Return a context in which the policy runs without its adapters."""
    return policy.disable_adapter()


def adapted_layers(policy: CausalLM) -> dict[str, AdapterLayer]:
    """Return one adapted layer for each name of such layers within their blocks; empty without LoRA."""
    layers = [(name, layer) for name, layer in policy.named_modules() if hasattr(layer, "lora_A")]
    return {name.rpartition(".")[2]: cast("AdapterLayer", layer) for name, layer in layers}


def adapter_config(policy: CausalLM) -> JsonObject:
    """Return the adapters' configuration for a server, in the form of peft's adapter_config.json."""
    config, layers = policy.peft_config[policy.active_adapter], adapted_layers(policy)
    return {
        "peft_type": "LORA",
        "r": config.r,
        "lora_alpha": config.r * next(iter(layers.values())).scaling[policy.active_adapter],  # servers divide by r
        "target_modules": sorted(layers),
    }


def adapter_tensors(policy: CausalLM) -> list[tuple[str, Tensor]]:
    """Return the parameters of the adapters and of a trained head, under the names that peft saves."""
    active = f".{policy.active_adapter}."
    return [
        (name.replace(active, ".").replace(HEAD, ".").replace(f".{MAGNITUDES}.weight", f".{MAGNITUDES}"), parameter)
        for name, parameter in policy.named_parameters()
        if "lora_" in name or HEAD in name
    ]


def adapter_layers(policy: nn.Module) -> list[AdapterLayer]:
    """Return all layers with adapters."""
    return [cast("AdapterLayer", module) for module in policy.modules() if hasattr(module, "get_delta_weight")]


def adapters_by_weight(model: nn.Module) -> dict[str, AdapterLayer]:
    """Return the layers with adapters by the names of the weights that they change, without adapters in the names."""
    layers = [(name, module) for name, module in model.named_modules() if hasattr(module, "get_delta_weight")]
    return {
        f"{plain_name(name)}.{weight_name(cast('AdapterLayer', layer))}": cast("AdapterLayer", layer)
        for name, layer in layers
    }


def weight_name(layer: AdapterLayer) -> str:
    """Return the name of the adapted weight in its base layer; experts and routers have adapters of parameters."""
    return getattr(layer, "parameter_name", "weight")


def adapts_parameter(layer: AdapterLayer) -> bool:
    """Whether adapters are those of a parameter, which only peft applies, and not of a linear layer."""
    return hasattr(layer, "parameter_name")


def plain_name(name: str) -> str:
    """Return the name that a weight has without adapters, which may be nested."""
    return name.replace(".base_layer", "")


@torch.no_grad()
def merged_weight(layer: AdapterLayer, weight: Tensor, gather: Callable[[Tensor], Tensor] = torch.detach) -> Tensor:
    """Return a layer's full weight with its adapters merged, in float32.

    Args:
        layer: The layer.
        weight: The full weight of its base: [O,I], or [I,O] if the layer has `fan_in_fan_out`; [E,O,I] or [E,I,O] of
            experts.
        gather: Returns the full magnitudes of DoRA; a collective if they are sharded.
    """
    merged = weight.float() + delta(layer)
    for magnitudes in layer.lora_magnitude_vector.values():  # agreed: the modules are the same on every rank
        norms = _norms(merged, magnitudes)
        merged *= gather(magnitudes.weight).view_as(norms) / norms
    return merged


def _norms(weight: Tensor, magnitudes: Magnitudes) -> Tensor:
    """Return the norm of each output of a weight, [O,1], or [1,O] if the weight is [I,O]."""
    norms: Tensor = torch.linalg.vector_norm(weight, dim=0 if magnitudes.fan_in_fan_out else 1, keepdim=True)
    return norms


def delta(layer: AdapterLayer) -> Tensor:
    """Return the update of a layer's weight by its adapters; all ranks must call this if they are sharded."""
    updates = []
    for name in layer.active_adapters:  # agreed: the modules are the same on every rank, and sharded alike
        if adapts_parameter(layer) or (name in layer.lora_A and isinstance(layer.lora_A[name].weight, DTensor)):
            down, up = full_tensor(layer.lora_A[name].weight), full_tensor(layer.lora_B[name].weight)
            updates.append(_product(layer, down, up) * layer.scaling[name])
        else:
            updates.append(layer.get_delta_weight(name))
    return torch.stack(updates).sum(0)


def _product(layer: AdapterLayer, down: Tensor, up: Tensor) -> Tensor:
    """Return the product of an adapter's full matrices, in their type, in the form of the weight; experts are stacked.

    Args:
        layer: The layer.
        down: [R,I], or [E*R,I] of experts.
        up: [O,R], or [O,R*E] of experts.
    """
    experts = getattr(layer, "num_experts", 1)
    if experts == 1:
        return (up @ down).T if layer.fan_in_fan_out else up @ down
    transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    form = "ore,eri->eio" if transposed else "ore,eri->eoi"
    return torch.einsum(form, up.view(len(up), -1, experts), down.view(experts, -1, down.shape[1]))


@torch.no_grad()
def merge_adapters(policy: CausalLM) -> CausalLM:
    """Merge the adapters into the weights, in float32 with one rounding to the weights' type, and return the model.

    Weights in 4 bits are dequantized first.
    """
    replace_layers(policy, QuantizedLinear, QuantizedLinear.dequantized)
    for adapter in adapter_layers(policy):
        weight = getattr(adapter.get_base_layer(), weight_name(adapter))
        weight.copy_(merged_weight(adapter, weight))
    for layer in policy.modules():
        if hasattr(layer, "original_module"):
            trained = cast("nn.ModuleDict", layer.modules_to_save)[policy.active_adapter]
            cast("nn.Module", layer.original_module).load_state_dict(trained.state_dict())
    return policy.unload().requires_grad_(True)  # peft leaves the weights frozen
