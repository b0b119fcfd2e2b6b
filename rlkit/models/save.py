"""Saving the policy and its tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from rlkit.base.errors import CheckpointError
from rlkit.models.lora import has_lora, score_head

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer


def save_policy(
    policy: CausalLM, tokenizer: Tokenizer, folder: Path, weights: dict[str, torch.Tensor] | None = None
) -> None:
    """Write a Hugging Face folder with the tokenizer and the model, or only its adapter, atomically.

    Args:
        policy: The model.
        tokenizer: Its tokenizer.
        folder: The folder to write.
        weights: Full tensors by the policy's parameter names; required if it is sharded.

    Raises:
        CheckpointError: The folder cannot be written.
    """
    partial = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        # embeddings are frozen; without this option peft asks the hub whether they have changed
        options = {"save_embedding_layers": False} if has_lora(policy) else {}
        if score_head(policy) is not None:  # it finds the end of a conversation by the padding
            policy.config.get_text_config().pad_token_id = tokenizer.pad_token_id
        policy.save_pretrained(partial, state_dict=weights, **options)
        tokenizer.save_pretrained(partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk, this frees space for `result.json`
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
