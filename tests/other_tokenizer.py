"""A model of another family than the tiny one: tokens of several bytes, other ids, another chat template."""

from __future__ import annotations

from pathlib import Path

import torch

from rlkit.interfaces.model import Tokenizer
from rlkit.models.load import load_policy, load_tokenizer
from rlkit.recipe import Model

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}: {{ m['content'] }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant: {% endif %}"
)
LIKE = {"<|turn|>": "<|im_start|>", "<|eot|>": "<|im_end|>", "<|pad|>": "<|endoftext|>"}
"""Its special tokens, and those of the tiny model with their meaning."""


def other_tokenizer(*merges: str) -> Tokenizer:
    """Return a byte-level tokenizer that joins pairs of tokens, such as `1 2`, whose ids run backwards."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    tokens = [*(merge.replace(" ", "") for merge in merges), *sorted(pre_tokenizers.ByteLevel.alphabet(), reverse=True)]
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    core = Core(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in LIKE])
    tokenizer: Tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|eot|>", pad_token="<|pad|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_other_model(folder: Path, *merges: str) -> Path:
    """Write the tiny model with this tokenizer; the embedding of a token is the mean over its bytes."""
    tokenizer, tiny = other_tokenizer(*merges), load_tokenizer(Model("tiny"))
    model = load_policy(Model("tiny"))
    vocabulary = tokenizer.get_vocab()
    embeddings = model.get_input_embeddings().weight.detach()
    rows = torch.zeros(len(vocabulary), embeddings.shape[1])
    for token, token_id in vocabulary.items():
        text = LIKE.get(token)
        ids = [tiny.get_vocab()[part] for part in ([text] if text else token)]
        rows[token_id] = embeddings[ids].mean(0)
    model.resize_token_embeddings(len(vocabulary))
    with torch.no_grad():
        model.get_input_embeddings().weight.copy_(rows)
    for config in (model.config, model.generation_config):
        config.eos_token_id, config.pad_token_id = vocabulary["<|eot|>"], vocabulary["<|pad|>"]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
