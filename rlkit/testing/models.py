"""Tiny random models of several architectures, and a tokenizer, all made on the spot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlkit.testing.pretrain import build_tokenizer

SIZES = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def random_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """Make a model of an architecture's name as transformers has it: `qwen2`, `llama`, `mistral`, `gemma2`, `gpt2` …

    Args:
        kind: The `model_type`.
        seed: Of the weights.
        changes: Configuration values other than the tiny ones.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = build_tokenizer()
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    values = {**SIZES, "bos_token_id": None, "eos_token_id": stop, "pad_token_id": pad, **changes}
    config = AutoConfig.for_model(kind, **values)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    return model


def save_random_model(folder: Path, kind: str = "qwen2", seed: int = 0, **changes: Any) -> Path:
    """Write a random model with its tokenizer as a Hugging Face folder; give the folder."""
    random_model(kind, seed, **changes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
