"""Low-rank adapters, through peft."""

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from rlkit.distributed.fsdp2 import full_tensor
from rlkit.errors import RecipeError
from rlkit.sections import Lora
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from rlkit.interfaces.model import AdapterLayer, CausalLM


HEAD = ".modules_to_save."
"""What peft puts between the name of a layer that is trained whole and that of its adapter."""


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

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, task_type=task)
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
            torch.manual_seed(seed)
            adapted: CausalLM = get_peft_model(policy, config)
    except ValueError as error:
        names = sorted(
            {name.rpartition(".")[2] for name, module in policy.named_modules() if hasattr(module, "weight")}
        )
        raise RecipeError(f"model.lora.targets is {lora.targets!r}: {error}. Modules: {', '.join(names)}") from error
    if base is not None:
        adapted.peft_config[adapted.active_adapter].base_model_name_or_path = base
    adapted.eval()
    return adapted


def load_adapter(policy: CausalLM, file: Path) -> None:
    """Load the adapters' values from safetensors, in place.

    Raises:
        RecipeError: The file cannot be read, or holds other tensors than these adapters.
    """
    from safetensors.torch import load_file

    try:
        saved = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{file} cannot be read: {error}") from error
    own = dict(adapter_tensors(policy))
    for name in sorted(own.keys() | saved.keys()):
        have, want = (list(x[name].shape) if name in x else "none" for x in (saved, own))
        if have != want:
            raise RecipeError(
                f"{file} does not fit model.lora and its base: {name} is {have} there, expected {want}; set "
                "model.lora.targets as when it was trained, and see base_model_name_or_path in adapter_config.json"
            )
        if not saved[name].is_floating_point() or not saved[name].isfinite().all():
            raise RecipeError(
                f"{file} holds no finite numbers in {name}; the adapter is damaged, or its training failed"
            )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(saved[name])


def has_lora(policy: CausalLM) -> bool:
    """Whether the policy has adapters."""
    return hasattr(policy, "peft_config")


def base_model(policy: CausalLM) -> CausalLM:
    """Return the Hugging Face model itself, including adapters in its layers."""
    return policy.get_base_model() if has_lora(policy) else policy


def score_head(policy: CausalLM) -> nn.Linear | None:
    """Return the layer of a sequence classifier from hidden states to scores; None for another model."""
    return getattr(base_model(policy), "score", None)


def adapters_off(policy: CausalLM) -> AbstractContextManager[None]:
    """Run the policy without its adapters."""
    return policy.disable_adapter()


def adapted(policy: CausalLM) -> dict[str, AdapterLayer]:
    """Return a layer with adapters for each name that such layers have within their blocks; none without LoRA."""
    layers = [(name, layer) for name, layer in policy.named_modules() if hasattr(layer, "lora_A")]
    return {name.rpartition(".")[2]: cast("AdapterLayer", layer) for name, layer in layers}


def adapter_config(policy: CausalLM) -> JsonObject:
    """Return the adapters' configuration for a server, in the form of peft's adapter_config.json."""
    config = policy.peft_config[policy.active_adapter]
    return {
        "peft_type": "LORA",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "use_rslora": config.use_rslora,
        "target_modules": sorted(adapted(policy)),
    }


def adapter_tensors(policy: CausalLM) -> list[tuple[str, Tensor]]:
    """Return the parameters of the adapters, and of a head that is trained, under the names that peft saves them by."""
    active = f".{policy.active_adapter}."
    found = [(name, x) for name, x in policy.named_parameters() if "lora_" in name or HEAD in name]
    return [(name.replace(active, ".").replace(HEAD, "."), x) for name, x in found]


def delta(layer: AdapterLayer) -> Tensor:
    """Return the update of a layer's weight by its adapters; if they are sharded, all ranks must call this."""
    parts = []
    for name in layer.active_adapters:  # agreed: the modules are the same on every rank
        # agreed: and so is how they are sharded
        if name in layer.lora_A and isinstance(layer.lora_A[name].weight, DTensor):
            product = (
                full_tensor(layer.lora_B[name].weight) @ full_tensor(layer.lora_A[name].weight) * layer.scaling[name]
            )
            parts.append(product.T if layer.fan_in_fan_out else product)
        else:
            parts.append(layer.get_delta_weight(name))
    return torch.stack(parts).sum(0)


@torch.no_grad()
def merged(policy: CausalLM) -> CausalLM:
    """Return the model with its adapters merged into its weights, in float32 and then rounded to the weights' type."""
    for layer in policy.modules():
        if hasattr(layer, "get_delta_weight"):
            adapter = cast("AdapterLayer", layer)
            weight = adapter.get_base_layer().weight
            weight.copy_(weight.float() + delta(adapter))
        if hasattr(layer, "original_module"):
            trained = cast("nn.ModuleDict", layer.modules_to_save)[policy.active_adapter]
            cast("nn.Module", layer.original_module).load_state_dict(trained.state_dict())
    return policy.unload().requires_grad_(True)  # peft leaves them frozen
