"""What `model.path` names: a model, an adapter, a checkpoint or a run; read as data only."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from functools import lru_cache
from os.path import isdir, isfile  # which are false, and no error, for names that no file can have
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rlkit.errors import RecipeError
from rlkit.models.store import CheckpointRef, Store, open_checkpoint, step_of
from rlkit.ranges import LARGEST
from rlkit.sections import Lora, Model
from rlkit.types import JsonObject

SHIPPED = {"tiny": Path(__file__).parent / "tiny", "tiny-tools": Path(__file__).parent / "tiny_tools"}
"""Models that come with rlkit: for additions, and for conversations with tools and games."""

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

DEEPEST = 8
"""The maximum number of adapters and checkpoints between a path and its base model."""

UNREAD = ("alpha_pattern", "alora_invocation_tokens", "layer_replication", "use_dora", "use_qalora")
"""Features of peft that change the computation of an adapter, but are not visible in its tensors."""

PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initialisations of an adapter that leave the base's weights unchanged."""


@dataclass(frozen=True)
class Source:
    """The place of a policy's weights.

    Args:
        place: The folder of a model, an adapter or a checkpoint, or a model's name on the hub.
        base: The source that an adapter or a checkpoint was trained from; None for a model.
        lora: The shape of the adapters at `place`; None if it has all weights.
        checkpoint: Whether `place` is a checkpoint of rlkit.
        scores: Whether it is a reward model: an adapter or a checkpoint of one, or a folder of a sequence classifier.
    """

    place: str
    base: Source | None = None
    lora: Lora | None = None
    checkpoint: bool = False
    scores: bool = False

    @property
    def model(self) -> str:
        """The folder or hub name of the base model, whose configuration applies to all sources on it."""
        return self.place if self.base is None else self.base.model

    @property
    def tokenizer(self) -> str:
        """The place of the tokenizer."""
        if self.base is None or isfile(Path(self.place, "tokenizer_config.json")):
            return self.place
        return self.base.tokenizer

    def __str__(self) -> str:
        if self.base is None:
            return self.place
        kind = "checkpoint" if self.checkpoint else "adapter"
        rank = "" if self.lora is None else f" of rank {self.lora.rank}"
        return f"the {kind} {self.place}{rank} on {_public(self.base)}"


def resolve(path: str) -> str:
    """Return the folder of a shipped model for its name, and any other path unchanged."""
    if path in SHIPPED and not os.path.exists(Path(path, "config.json")):
        return str(SHIPPED[path])
    return os.path.expanduser(path)


def locate(path: str, depth: int = 0) -> Source:
    """Return the source at a path, with its bases.

    Args:
        path: A name on the hub, or a folder: of a model, an adapter, a checkpoint, or a run, of which `final/` is
            taken, or its newest checkpoint where that is of a later step.
        depth: The number of adapters and checkpoints on it so far.

    Raises:
        RecipeError: It is an adapter or a checkpoint that cannot be read, or whose base cannot be found.
    """
    if depth > DEEPEST:
        raise RecipeError(f"{path!r} is based on more than {DEEPEST} other adapters or checkpoints; merge some of them")
    if "://" in path:
        return _checkpoint(_remote(path), depth)
    folder = Path(resolve(path))
    if isfile(folder / ADAPTER):
        return _adapter(folder, depth)
    if isfile(folder / "manifest.json") and isfile(folder / "state.json"):
        store = Store(str(folder.parent))
        return _checkpoint(CheckpointRef(store, folder.name, store.state(folder.name)), depth)
    if isdir(folder) and not isfile(folder / "config.json"):
        inner = _within(folder)
        if inner is not None:
            return locate(str(inner), depth)
    scores = classifies(_json(folder / "config.json").get("architectures"))
    return Source(str(folder) if isdir(folder) else path, scores=scores)


def classifies(architectures: object) -> bool:
    """Whether the `architectures` of a model's configuration name a sequence classifier."""
    listed = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in listed)


def source_of(model: Model) -> Source:
    """Return the source of a recipe's `model:`.

    Raises:
        RecipeError: It cannot be read, or it is an adapter and `model.lora` describes another one.
    """
    source = locate(model.path)
    mine, theirs = model.lora, source.lora if source.scores == (model.head == "score") else None
    if mine is not None and theirs is not None and (mine.rank, mine.alpha) != (theirs.rank, theirs.alpha):
        raise RecipeError(
            f"model.path is {source}, of alpha {theirs.alpha:g}, but model.lora has rank {mine.rank} and alpha "
            f"{mine.alpha:g}; to train that adapter further, set model.lora.rank: {theirs.rank} and model.lora.alpha: "
            f"{theirs.alpha:g}; for new adapters, merge it first: rlkit export --merge-lora --checkpoint "
            f"{model.path} --out DIR, and set model.path: DIR"
        )
    return source


def base_name(path: str) -> str:
    """Return the name under which adapters of a model record it: of a shipped one its own, else a whole path."""
    return _public(locate(path))


def _public(source: Source) -> str:
    for name, folder in SHIPPED.items():
        if source.place == str(folder):
            return name
    return str(Path(source.place).resolve()) if isdir(source.place) else source.place


def _within(folder: Path) -> Path | None:
    """Find the policy of a run's folder, or of a folder of checkpoints; None where there is neither."""
    stores = [Store(str(place)) for place in (folder / "checkpoints", folder)]
    name, store = next(((store.names()[0], store) for store in stores if store.names()), (None, None))
    final = folder / "final"
    steps = _json(folder / "result.json").get("steps")
    whole = any(isfile(final / file) for file in (ADAPTER, "config.json"))
    if whole and (name is None or (isinstance(steps, int) and step_of(name) <= steps)):
        return final
    return None if store is None else Path(store.root, str(name))


def _json(path: Path) -> JsonObject:
    """Read a JSON object; an empty one where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _adapter(folder: Path, depth: int) -> Source:
    config = _json(folder / ADAPTER)
    if not isfile(folder / ADAPTER_WEIGHTS):
        raise RecipeError(
            f"{folder} is an adapter without {ADAPTER_WEIGHTS}; save it as safetensors: what is pickled could run code"
        )
    unread = [name for name in UNREAD if config.get(name)]
    unread += [] if config.get("init_lora_weights") in PLAIN_INITS else ["init_lora_weights"]
    if config.get("peft_type") != "LORA" or unread:
        what = f"has {unread[0]} = {config[unread[0]]!r}" if unread else f"is of type {config.get('peft_type')!r}"
        raise RecipeError(f"{folder} {what}, expected plain LoRA; merge it into its model with peft, and use that")
    shapes = _shapes(folder / ADAPTER_WEIGHTS)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if type(rank) is not int or not all(rank in shape for name, shape in shapes.items() if ".lora_" in name):
        raise RecipeError(f"{folder / ADAPTER} has r = {rank!r}, which is not the rank of the adapter's tensors")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < LARGEST:
        raise RecipeError(f"{folder / ADAPTER} has lora_alpha = {alpha!r}, expected a number above 0")
    listed = config.get("target_modules")
    if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):  # a pattern
        listed = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in shapes}
    scale = math.sqrt(rank) if config.get("use_rslora") else 1.0
    lora = Lora(rank, float(alpha) * scale, sorted(listed))
    base = _base(folder, config.get("base_model_name_or_path"), depth)
    return Source(str(folder), base, lora, scores=config.get("task_type") == "SEQ_CLS")


def _shapes(file: Path) -> dict[str, list[int]]:
    """Read which tensors a safetensors file has."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{file} cannot be read: {error}") from error


def _base(folder: Path, named: object, depth: int) -> Source:
    remedy = f"set base_model_name_or_path in {folder / ADAPTER} to the model's folder or its name on the hub"
    if not isinstance(named, str) or not named:
        raise RecipeError(f"the adapter {folder} does not name its base model; {remedy}")
    on_the_hub = named.count("/") <= 1 and not named.startswith((".", "/", "~"))
    if not on_the_hub and not isdir(resolve(named)):
        raise RecipeError(f"the adapter {folder} belongs to {named!r}, which is not on this machine; {remedy}")
    return locate(named, depth + 1)


def _checkpoint(found: CheckpointRef, depth: int) -> Source:
    """Read a checkpoint's base model and adapters from its recipe, without its tensors."""
    model = found.model()
    base = locate(model.path, depth + 1)
    if model.lora is not None and base.lora is not None and base.base is not None:
        base = base.base  # the run resumed adapters, whose values are in the checkpoint
    return Source(found.place, base, model.lora, checkpoint=True, scores=model.head == "score")


@lru_cache(maxsize=1)
def _remote(url: str) -> CheckpointRef:
    """Open a checkpoint at a URL; its files are verified each time."""
    return open_checkpoint(url)
