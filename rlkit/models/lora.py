"""Low-rank adapters, through peft."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from rlkit.errors import RecipeError
from rlkit.sections import Lora


def add_lora(policy: Any, lora: Lora) -> Any:
    """Freeze the policy and give it adapters to train.

    Raises:
        RecipeError: A target names no module.
    """
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules=lora.targets, task_type="CAUSAL_LM")
    try:
        adapted = get_peft_model(policy, config)
    except ValueError as error:
        names = sorted(
            {name.rpartition(".")[2] for name, module in policy.named_modules() if hasattr(module, "weight")}
        )
        raise RecipeError(f"model.lora.targets is {lora.targets!r}: {error}. Modules: {', '.join(names)}") from error
    adapted.eval()
    return adapted


def has_lora(policy: Any) -> bool:
    """Whether the policy has adapters."""
    return hasattr(policy, "peft_config")


def base_model(policy: Any) -> Any:
    """Give the Hugging Face model itself, its layers holding the adapters if there are any."""
    return policy.get_base_model() if has_lora(policy) else policy


def adapters_off(policy: Any) -> AbstractContextManager[None]:
    """Run the policy as it was before training."""
    context: AbstractContextManager[None] = policy.disable_adapter()
    return context
