"""Export of a checkpoint or a run as a Hugging Face folder."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

import torch

from rlkit.api.policy import chat_template
from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.models.load import cast_weights, is_reward_model, load_policy
from rlkit.models.lora import has_lora, merge_adapters
from rlkit.models.save import save_policy
from rlkit.models.source import locate, merge_overrides
from rlkit.recipe import Model
from rlkit.recipe.model import Overrides


def export(
    checkpoint: str,
    out: Path,
    merge: bool = False,
    dtype: Literal["float32", "bfloat16"] = "float32",
    trust_remote_code: bool = False,
    *,
    config: Overrides | None = None,
) -> str:
    """Write a policy as a folder that transformers loads: the model, or its adapter.

    Args:
        checkpoint: A checkpoint, a run folder, its `final/`, or another folder with a model or an adapter.
        out: Folder to write.
        merge: Whether to merge the adapter into the model, in float32.
        dtype: Data type to which a model's weights are rounded at the end; those of an adapter stay float32.
        trust_remote_code: Whether to run code that comes with the model; the checkpoint's own setting is ignored.
        config: Values that replace those of the configuration, as in `model.config`; None for none.

    Returns:
        The folder or URL that was exported.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or of another model, or has no adapter to merge.
        RecipeError: The base model of an adapter or a checkpoint cannot be found.
    """
    source = locate(checkpoint)
    if source.base is None and not os.path.isfile(Path(source.location, "config.json")):
        kind = CheckpointError if os.path.isdir(checkpoint) or "://" in checkpoint else RecipeError
        raise kind(
            f"there is no complete checkpoint at {checkpoint!r}; "
            "expected a run folder, its final/ or one of its checkpoints"
        )
    if merge and source.lora is None:
        raise CheckpointError(f"{source.location} has no adapter to merge; leave out --merge-lora")
    model = Model(source.location, source.lora, config=config or {}, trust_remote_code=trust_remote_code)
    model.quantization = source.quantization
    if is_reward_model(model):
        model.head = "score"
    policy = load_policy(model)
    if merge:
        policy = merge_adapters(policy)
    if not has_lora(policy):
        policy = cast_weights(policy, getattr(torch, dtype))
    out.parent.mkdir(parents=True, exist_ok=True)
    template, overrides = chat_template(model), merge_overrides(source.overrides, model.config)
    save_policy(policy, template.tokenizer, out, overrides=overrides, ends=template.ends)
    return source.location
