"""Tiny random models of several architectures, and a tokenizer, built without downloads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer


SIZES = {
    "vocab_size": 264, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3,
}  # fmt: skip

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>"]


def build_tokenizer() -> Tokenizer:
    """Return the byte-level tokenizer: one token per byte, and the ChatML markers."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Core(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(s, special=True) for s in SPECIAL[:3]])
    core.add_tokens([AddedToken(s, special=False, normalized=False) for s in SPECIAL[3:]])
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=4096
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def random_model(kind: str, seed: int = 0, key_bias: float = 0.0, **changes: object) -> CausalLM:
    """Return a random model of an architecture of transformers: `qwen2`, `llama`, `mistral`, `gemma2`, `gpt2` …

    Args:
        kind: The `model_type`.
        seed: Seed of the weights.
        key_bias: Bias of two channels of each key head, in architectures with key biases; trained models of the Qwen2.5
            family have 100 and more.
        changes: Configuration values that replace the tiny ones.

    Raises:
        ValueError: The architecture has no key biases.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    tokenizer = build_tokenizer()
    stop, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    values = {**SIZES, "bos_token_id": None, "eos_token_id": stop, "pad_token_id": pad, **changes}
    config = AutoConfig.for_model(kind, **values)
    torch.manual_seed(seed)
    model: CausalLM = AutoModelForCausalLM.from_config(config).eval()
    if key_bias:
        _bias_keys(model, key_bias)
    model.generation_config = GenerationConfig(eos_token_id=stop, pad_token_id=pad)
    return model


def _bias_keys(model: CausalLM, size: float) -> None:
    """Set two random channels of each key head to a bias, drawn for each layer and head."""
    import torch

    biases = [weight for name, weight in model.named_parameters() if name.endswith("k_proj.bias")]
    if not biases:
        raise ValueError(f"{type(model).__name__} has no key biases, expected k_proj.bias among its weights")
    config = model.config.get_text_config()
    with torch.no_grad():
        for bias in biases:
            for head in bias.view(config.num_key_value_heads, -1):
                head[torch.randperm(len(head))[:2]] = size


def save_random_model(
    folder: Path, kind: str = "qwen2", seed: int = 0, key_bias: float = 0.0, **changes: object
) -> Path:
    """Write a random model with its tokenizer as a Hugging Face folder; return the folder."""
    random_model(kind, seed, key_bias, **changes).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return folder
