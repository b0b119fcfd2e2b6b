"""Going on from a checkpoint: which one, whether the recipe still fits it, and bringing the run to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from rlkit.errors import CheckpointError, RecipeError
from rlkit.loop.checkpoint import FORMAT, STATE, Store
from rlkit.loop.run import Run
from rlkit.loop.state import restore, tensors
from rlkit.models.ranks import Ranks

FIXED = ("model.path", "model.lora", "critic.path", "critic.lora")
"""Options that decide what a checkpoint's tensors are: none can change on resume."""

PRESENT = ("critic", "reference", "shaping", "kl_reward", "train.ema")
"""What has state if it is there at all: it can neither come nor go."""

FREE = (
    "fabric",
    "log",
    "save",
    "validation",
    "train.micro_tokens",
    "train.checkpoint_activations",
    "train.offload_during_rollout",
    "train.deadline",
)
"""Options that may change: what is learnt stays the same. `train.steps` too, where no learning rate decays by it."""


@dataclass
class Found:
    """A checkpoint to go on from."""

    store: Store
    name: str
    state: dict[str, Any]

    @property
    def place(self) -> str:
        return f"{self.store.url}/{self.name}"


def open_checkpoint(place: str) -> Found:
    """Find a checkpoint by its own path, or the newest one of a run folder or a folder of checkpoints.

    Raises:
        CheckpointError: There is none.
    """
    place = place.rstrip("/")
    for url in (f"{place}/checkpoints", place):
        store = Store(url)
        if names := store.names():
            return read(store, names[0])
    parent, _, name = place.rpartition("/")
    store = Store(parent or ".")
    if name in store.names():
        return read(store, name)
    raise CheckpointError(f"there is no whole checkpoint at {place!r}; give a run folder, or one of its checkpoints")


def read(store: Store, name: str) -> Found:
    """Read what a checkpoint says of itself.

    Raises:
        CheckpointError: It says nothing, or is of another format.
    """
    state = store.read(name, STATE)
    if state.get("format") != FORMAT:
        raise CheckpointError(f"{store.url}/{name} has format {state.get('format')!r}, expected {FORMAT}")
    return Found(store, name, state)


def newest_whole(store: Store, ranks: Ranks) -> tuple[Found | None, list[str]]:
    """Give the newest checkpoint whose files are as they were written, and what is wrong with newer ones."""
    damaged: list[str] = []
    for name in store.names():
        try:
            store.verify(name, ranks)
            return read(store, name), damaged
        except CheckpointError as error:
            damaged.append(str(error))
    return None, damaged


def compare(found: Found, recipe_yaml: str, force: bool) -> list[str]:
    """Give a line for each difference that a resumed run may have.

    Raises:
        RecipeError: A difference breaks the state, or changes what is learnt and `force` is not given.
    """
    old, new = (_flat(yaml.safe_load(text)) for text in (found.state["recipe"], recipe_yaml))
    changed = [key for key in sorted(old | new) if old.get(key) != new.get(key)]
    lines = {key: f"{key}: {old.get(key)!r} in the checkpoint, {new.get(key)!r} now" for key in changed}
    moved = [part for part in PRESENT if any(_under(k, part) for k in old) != any(_under(k, part) for k in new)]
    broken = [line for key, line in lines.items() if any(_under(key, part) for part in (*FIXED, *moved))]
    if broken:
        raise RecipeError(f"the recipe does not fit {found.place}:\n" + "\n".join(broken))
    decays = {"linear", "cosine"} & {new.get("train.schedule"), new.get("critic.schedule")}
    free = FREE if decays else (*FREE, "train.steps")
    rest = [line for key, line in lines.items() if not any(_under(key, part) for part in free)]
    if rest and not force:
        raise RecipeError(
            f"the recipe is not that of {found.place}:\n"
            + "\n".join(rest)
            + "\nadd --force to go on with it as it is now"
        )
    return list(lines.values())


def load(run: Run, found: Found) -> None:
    """Bring a run to a checkpoint.

    Raises:
        CheckpointError: It is of another model.
    """
    found.store.load(found.name, tensors(run, found.store.tensor_names(found.name)))
    restore(run, found.state["numbers"])


def _under(key: str, section: str) -> bool:
    return key == section or key.startswith(f"{section}.")


def _flat(section: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(section, dict):
        return {} if section is None else {prefix: section}
    return {k: v for name, part in section.items() for k, v in _flat(part, f"{prefix}.{name}".lstrip(".")).items()}
