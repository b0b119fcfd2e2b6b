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


def add_lora(policy: CausalLM, lora: Lora, seed: int = 0, base: str | None = None, task: str = "CAUSAL_LM") -> CausalLM:
    """Freeze a model and add adapters in float32 to train, the same on every rank.

    Args:
        policy: The model.
        lora: The shape of the adapters.
        seed: Seed of their initial values.
        base: The model's name or folder, which saved adapters record; None for the model's own record.
        task: peft's task type of the model.

    Raises:
        RecipeError: A target names no module.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        task_type=task,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
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
            raise RecipeError(
                f"{file} has numbers in {name} that are not finite; the adapter is damaged, or its training failed"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def has_lora(policy: CausalLM) -> bool:
    """Whether the policy has adapters."""
    return hasattr(policy, "peft_config")


def frozen_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights that are not trained, under their names without adapters."""
    return {
        name.replace(".base_layer.", "."): weight
        for name, weight in model.named_parameters()
        if not weight.requires_grad
    }


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


@torch.no_grad()
def merged_weight(layer: AdapterLayer, weight: Tensor, gather: Callable[[Tensor], Tensor] = torch.detach) -> Tensor:
    """Return a layer's full weight with its adapters merged, in float32.

    Args:
        layer: The layer.
        weight: The full weight of its base: [O,I], or [I,O] if the layer has `fan_in_fan_out`.
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
        if name in layer.lora_A and isinstance(layer.lora_A[name].weight, DTensor):
            product = (
                full_tensor(layer.lora_B[name].weight) @ full_tensor(layer.lora_A[name].weight) * layer.scaling[name]
            )
            updates.append(product.T if layer.fan_in_fan_out else product)
        else:
            updates.append(layer.get_delta_weight(name))
    return torch.stack(updates).sum(0)


@torch.no_grad()
def merge_adapters(policy: CausalLM) -> CausalLM:
    """Merge the adapters into the weights, in float32 with one rounding to the weights' type, and return the model.

    Weights in 4 bits are dequantized first.
    """
    replace_layers(policy, QuantizedLinear, QuantizedLinear.dequantized)
    for adapter in adapter_layers(policy):
        weight = adapter.get_base_layer().weight
        weight.copy_(merged_weight(adapter, weight))
    for layer in policy.modules():
        if hasattr(layer, "original_module"):
            trained = cast("nn.ModuleDict", layer.modules_to_save)[policy.active_adapter]
            cast("nn.Module", layer.original_module).load_state_dict(trained.state_dict())
    return policy.unload().requires_grad_(True)  # peft leaves the weights frozen
