"""How large a model is, without loading it."""

from __future__ import annotations

from typing import Any

import torch

from rlkit.models.load import load_config
from rlkit.models.lora import add_lora
from rlkit.sections import Model


def parameters(model: Model, adapters: bool = False) -> int:
    """Count a model's parameters, tied ones once; with `adapters`, those of its LoRA too."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        policy = AutoModelForCausalLM.from_config(load_config(model), trust_remote_code=model.trust_remote_code)
        if adapters and model.lora is not None:
            policy = add_lora(policy, model.lora)
    return sum(int(p.numel()) for p in policy.parameters())


def kv_bytes(config: Any, tokens: int) -> int:
    """Give the bytes of a key-value cache of so many tokens in float32."""
    heads = int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
    return tokens * int(config.num_hidden_layers) * 2 * heads * size * 4
