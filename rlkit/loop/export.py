"""From a checkpoint to a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from rlkit.errors import CheckpointError
from rlkit.loop.state import trainable
from rlkit.models.load import load_policy, load_tokenizer, save_policy
from rlkit.models.lora import merged
from rlkit.models.store import open_checkpoint


def export(checkpoint: str, out: Path, merge: bool = False, trust_remote_code: bool = False) -> str:
    """Write a checkpoint's policy as a folder that transformers loads: the model, or its adapter.

    Args:
        checkpoint: A checkpoint, or a run folder for its newest.
        out: The folder to write.
        merge: Merge the adapter into the model.
        trust_remote_code: Run code that comes with the model; the checkpoint's own word for it does not count.

    Returns:
        The checkpoint that was taken.

    Raises:
        CheckpointError: There is none, it is damaged or of another model, or there is no adapter to merge.
    """
    found = open_checkpoint(checkpoint)
    model = found.model()
    model.trust_remote_code = trust_remote_code
    if merge and model.lora is None:
        raise CheckpointError(f"{found.place} has no adapter to merge; leave out --merge-lora")
    policy = load_policy(model)
    found.store.load(found.name, trainable("policy.policy", policy))
    out.parent.mkdir(parents=True, exist_ok=True)
    save_policy(merged(policy) if merge else policy, load_tokenizer(model), out)
    return found.place
