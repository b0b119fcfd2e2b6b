"""Saving the policy and its tokenizer."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils import cached_file

from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.models.lora import base_model, has_lora, score_head
from rlkit.models.source import ADAPTER, BASE, SHIPPED
from rlkit.models.vision import reads_pictures

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of a processor besides those of its tokenizer."""

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
        save_processor(base_model(policy), tokenizer, partial)
        if has_lora(policy):
            _add_shipped_base(partial, folder)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk, this frees space for `result.json`
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def save_processor(model: CausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the tokenizer, and copy the other files of a processor as they are, since they also configure videos."""
    tokenizer.save_pretrained(folder)
    for name in PROCESSOR_FILES if reads_pictures(model.config) else ():
        options = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
        source = cached_file(model.name_or_path, name, **options)
        if source is not None:
            shutil.copyfile(source, folder / name)


def save_object(model: PreTrainedModel, tokenizer: Tokenizer | None, folder: Path) -> None:
    """Write a model of transformers as a Hugging Face folder, from which a run loads it.

    Args:
        model: The model.
        tokenizer: Its tokenizer; None for the one of its `name_or_path`.
        folder: The folder to write.

    Raises:
        RecipeError: There is no tokenizer.
        CheckpointError: The folder cannot be written.
    """
    name = getattr(model, "name_or_path", "")
    try:
        tokenizer = tokenizer or AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise RecipeError(f"the model object of {name!r} comes without a tokenizer; set tokenizer") from error
    save_policy(model, tokenizer, folder)


def _add_shipped_base(adapter: Path, folder: Path) -> None:
    """Copy a shipped model beside its adapter, since only rlkit knows its name: peft reads a folder.

    Args:
        adapter: The folder of the adapter, as it is written.
        folder: The folder that it becomes.
    """
    config = json.loads((adapter / ADAPTER).read_text(encoding="utf-8"))
    base = SHIPPED.get(config["base_model_name_or_path"])
    if base is not None:
        shutil.copytree(base, adapter / BASE)
        config["base_model_name_or_path"] = str(folder.resolve() / BASE)
        (adapter / ADAPTER).write_text(json.dumps(config, indent=2, sort_keys=True), encoding="utf-8")
