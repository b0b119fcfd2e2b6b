"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import yaml

from rlkit.errors import CheckpointError
from rlkit.loop.resume import open_checkpoint
from rlkit.loop.state import trainable
from rlkit.models.load import load_policy, load_tokenizer, save_policy
from rlkit.models.lora import merged
from rlkit.sections import Lora, Model


def export(checkpoint: str, out: Path, merge: bool = False) -> str:
    """Write a checkpoint's policy as a folder that transformers loads: the model, or its adapter.

    Args:
        checkpoint: A checkpoint, or a run folder for its newest.
        out: The folder to write.
        merge: Merge the adapter into the model.

    Returns:
        The checkpoint that was taken.

    Raises:
        CheckpointError: There is none, it is damaged or of another model, or there is no adapter to merge.
    """
    found = open_checkpoint(checkpoint)
    found.store.verify(found.name)
    section = dict(yaml.safe_load(found.state["recipe"])["model"])
    lora = section.pop("lora", None)
    if merge and lora is None:
        raise CheckpointError(f"{found.place} has no adapter to merge; leave out --merge-lora")
    model = Model(**section, lora=None if lora is None else Lora(**lora))
    policy = load_policy(model)
    found.store.load(found.name, trainable("policy.policy", policy))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_policy(merged(policy) if merge else policy, load_tokenizer(model), out)
    return found.place
