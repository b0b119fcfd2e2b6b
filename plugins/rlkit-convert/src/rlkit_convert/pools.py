"""Models that a peer puts on GPUs of their own: the section `placement:`."""

from __future__ import annotations

from typing import NamedTuple

from rlkit_convert.conversion import Conversion
from rlkit_convert.values import integer

BY_HAND = "the section `placement:` (rlkit docs placement)"
IN_TRAINER = "nothing to do: the model is in the trainer's processes"


class OwnGpus(NamedTuple):
    """The GPUs that a peer gives to a model.

    Args:
        role: rlkit's role of the model.
        pool: The pool that it shares with models of the same name.
        gpus: The peer's option with the number of GPUs on a node.
        nodes: The peer's option with the number of nodes.
        also: Further options of the peer's by which it has GPUs of its own.
    """

    role: str
    pool: str
    gpus: str
    nodes: str
    also: tuple[str, ...] = ()


def place(conversion: Conversion, own: OwnGpus) -> None:
    """Put a model into a pool, or say why it is not in one."""
    if not conversion.has(own.gpus):
        return
    count, nodes = conversion.get(own.gpus, integer, 0), conversion.get(own.nodes, integer, 1)
    ranks = conversion.recipe.get("fabric.devices", (count, ""))[0]
    trainer_nodes = conversion.recipe.get("fabric.num_nodes", (1, ""))[0]
    if count < 1 or not _has_model(conversion, own.role):
        conversion.note(own.gpus, "nothing to do: the recipe has no such model")
    elif own.role == "reference" and "model.lora.rank" in conversion.recipe:
        conversion.note(own.gpus, "nothing to do: the reference is the policy without its adapters")
    elif nodes != 1 or trainer_nodes != 1:
        conversion.ask(own.gpus, f"{BY_HAND}, on several machines with `--launcher Ray`")
    elif not isinstance(ranks, int) or ranks < 1 or max(count, ranks) % min(count, ranks):
        conversion.ask(
            own.gpus, f"{BY_HAND}: of {count} and fabric.devices, {ranks}, one must be a multiple of the other"
        )
    else:
        pool = f"placement.pools.{own.pool}"
        conversion.set(f"placement.roles.{own.role}", own.pool, own.gpus, *own.also)
        conversion.set(f"{pool}.devices", count, own.gpus, own.nodes)
        conversion.set(f"{pool}.precision", "bf16-mixed")
        is_shared = conversion.recipe.get("placement.roles.reward", ("", ""))[0] == own.pool
        if is_shared:  # reward models are not sharded
            conversion.recipe.pop(f"{pool}.strategy", None)
        elif count > 1:
            conversion.set(f"{pool}.strategy", "fsdp2")


def _has_model(conversion: Conversion, role: str) -> bool:
    """Check whether the recipe has the model of a role."""
    sections = {key.partition(".")[0] for key in conversion.recipe}
    if role == "reward":
        return conversion.recipe.get("reward", ("", ""))[0] == "ModelReward"
    return not sections.isdisjoint({"critic"} if role == "critic" else {"kl_loss", "kl_reward"})
