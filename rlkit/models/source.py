"""What `model.path` names: a model, an adapter, a checkpoint or a run; read as data only."""

from __future__ import annotations

import filecmp
import json
import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import lru_cache
from os.path import isdir, isfile  # unlike Path's, these return False for names that no file can have
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rlkit.base.errors import RecipeError, show
from rlkit.base.files import MANIFEST, check_run_folder, nearby
from rlkit.base.ranges import LARGEST
from rlkit.models import SHIPPED
from rlkit.models.checkpoint_schema import STATE
from rlkit.models.checkpoints import CheckpointRef, open_checkpoint
from rlkit.models.store import Store, step_of
from rlkit.recipe import Lora, Model
from rlkit.recipe.model import Quantization
from rlkit.types import JsonObject

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
MAGNITUDES = "lora_magnitude_vector"
"""peft's name of what DoRA trains beside the matrices of an adapter."""
OVERRIDES = "model_config.json"
"""The file in an adapter's folder with the values of `model.config` that it was trained with."""
NF4 = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
}
"""`quantization_config` in `OVERRIDES`: transformers' name of `model.quantization: nf4`."""
BASE = "base"
"""The folder in an adapter's folder that has its base model, if that ships with rlkit."""

RUNS = "runs/"
"""The folder of runs, where `rlkit fit` and the documentation put them."""
RECIPES_OF_RUNS = {"runs/sft": "quick_sft", "runs/rm": "quick_rm", "runs/teacher": "quickstart"}
"""Runs that shipped recipes begin with, and the recipe of each."""

MAX_DEPTH = 8
"""The maximum number of adapters and checkpoints between a path and its base model."""

UNSUPPORTED = ("alora_invocation_tokens", "layer_replication", "use_qalora")
"""Features of peft that change the computation of an adapter without showing in its tensors."""

PATTERNS = ("rank_pattern", "alpha_pattern")
"""peft's ranks and scales of single modules by name, which it writes for experts that it joins."""

PATTERN_NAME = re.compile(r"(\.\*\\\.)?[\w.]+")
"""A key of `PATTERNS`: a name, after any other; peft takes regular expressions, which could run for hours."""

PLAIN_INITS = (None, True, False, "gaussian", "orthogonal", "eva")
"""Initialisations of an adapter that leave the base's weights unchanged."""


@dataclass(frozen=True)
class Source:
    """The source of a model's weights.

    Args:
        location: The folder of a model, an adapter or a checkpoint, or a model's name on the hub.
        base: The source that an adapter or a checkpoint was trained from; None for a model.
        lora: The shape of the adapters at `location`; None if it has all weights.
        checkpoint: Whether `location` is a checkpoint of rlkit.
        scores: Whether it is a reward model: a sequence classifier, or an adapter or a checkpoint of one.
        overrides: Values of `model.config` that an adapter or a checkpoint was trained with.
        patterns: peft's `rank_pattern` and `alpha_pattern` of the adapters at `location`.
        quantization: The type of the base's weights under the adapters, as in `model.quantization`.
    """

    location: str
    base: Source | None = None
    lora: Lora | None = None
    checkpoint: bool = False
    scores: bool = False
    overrides: JsonObject = field(default_factory=dict)
    patterns: JsonObject = field(default_factory=dict)
    quantization: Quantization | None = None

    @property
    def model(self) -> str:
        """The folder or hub name of the base model, which has the configuration."""
        return self.location if self.base is None else self.base.model

    @property
    def tokenizer(self) -> str:
        """The folder or hub name of the tokenizer."""
        if self.base is None or isfile(Path(self.location, "tokenizer_config.json")):
            return self.location
        return self.base.tokenizer

    def __str__(self) -> str:
        if self.base is None:
            return self.location
        kind = "checkpoint" if self.checkpoint else "adapter"
        rank = "" if self.lora is None else f" of rank {self.lora.rank}"
        return f"the {kind} {self.location}{rank} on {_public(self.base)}"


def resolve(path: str) -> str:
    """Return the folder of a shipped model for its name, and any other path unchanged."""
    if path in SHIPPED and not os.path.exists(Path(path, "config.json")):
        return str(SHIPPED[path])
    return os.path.expanduser(path)


def locate(path: str, depth: int = 0) -> Source:
    """Return the source at a path, with its bases.

    Args:
        path: A name on the hub, or the folder of a model, an adapter, a checkpoint or a run. A run stands for its
            `final/`, or for its newest checkpoint if that has a later step.
        depth: The number of adapters and checkpoints that are based on this path so far.

    Raises:
        RecipeError: An adapter or a checkpoint cannot be read, or its base cannot be found.
    """
    if depth > MAX_DEPTH:
        raise RecipeError(f"{path!r} is based on more than {MAX_DEPTH} other adapters or checkpoints; merge them")
    if "://" in path:
        return _checkpoint(_remote(path), depth)
    folder = Path(resolve(path))
    if path.startswith(RUNS) and not isdir(folder):  # a name on the hub too, whose user is `runs`
        recipe = RECIPES_OF_RUNS.get(path)
        hint = nearby(folder) if recipe is None else f"train it first: rlkit fit --recipe {recipe} --out {path}"
        raise RecipeError(f"{path!r} is a run that is not here; {hint}")
    if isfile(folder / ADAPTER):
        return _adapter(folder, depth)
    if isfile(folder / MANIFEST) and isfile(folder / STATE):
        store = Store(str(folder.parent))
        return _checkpoint(CheckpointRef(store, folder.name, store.state(folder.name)), depth)
    if isdir(folder) and not isfile(folder / "config.json"):
        policy = _policy_in(folder)
        if policy is not None:
            return locate(str(policy), depth)
    scores = classifies(_json(folder / "config.json").get("architectures"))
    return Source(str(folder) if isdir(folder) else path, scores=scores)


def classifies(architectures: object) -> bool:
    """Whether the `architectures` of a model's configuration name a sequence classifier."""
    names = architectures if isinstance(architectures, list) else []
    return any(str(name).endswith("ForSequenceClassification") for name in names)


def merge_overrides(values: Mapping[str, object], overrides: Mapping[str, object]) -> JsonObject:
    """Return a copy of nested values with others laid over them."""
    merged: JsonObject = deepcopy(dict(values))
    for name, value in overrides.items():
        old = merged.get(name)
        nested = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[name] = merge_overrides(old, value) if nested else deepcopy(value)  # type: ignore[arg-type]
    return merged


def source_of(model: Model) -> Source:
    """Return the source of a recipe's `model:`.

    Raises:
        RecipeError: It cannot be read, or it is an adapter that does not match `model.lora`.
    """
    source = locate(model.path)
    lora = model.lora
    saved = source.lora if source.scores == model.scores else None
    if lora is None or saved is None:
        return source
    if saved is not None and source.quantization not in (None, model.quantization):
        raise RecipeError(
            f"model.path is {source}, trained with model.quantization: {source.quantization}, but it is "
            f"{model.quantization} now; set it to {source.quantization}, or merge the adapter first: rlkit export "
            f"--merge-lora --checkpoint {model.path} --out DIR, and set model.path: DIR"
        )
    if (lora.rank, lora.scale, lora.use_dora) != (saved.rank, saved.scale, saved.use_dora):
        raise RecipeError(
            f"model.path is {source}, of alpha {saved.alpha:g}, but model.lora has rank {lora.rank} and alpha "
            f"{lora.alpha:g}{_variant(lora)}; to train that adapter further, set model.lora.rank: {saved.rank} and "
            f"model.lora.alpha: {saved.alpha:g}{_variant(saved)}; for new adapters, merge it first: rlkit export "
            f"--merge-lora --checkpoint {model.path} --out DIR, and set model.path: DIR"
        )
    return source


def _variant(lora: Lora) -> str:
    return f", use_rslora: {str(lora.use_rslora).lower()} and use_dora: {str(lora.use_dora).lower()}"


def base_name(path: str) -> str:
    """Return the name of a model that its adapters record: a shipped model's own name, or an absolute path."""
    return _public(locate(path))


def _public(source: Source) -> str:
    for name, folder in SHIPPED.items():
        if source.location == str(folder):
            return name
    return str(Path(source.location).resolve()) if isdir(source.location) else source.location


def _policy_in(folder: Path) -> Path | None:
    """Return the policy in a run folder or a folder of checkpoints; None if there is none.

    Raises:
        RecipeError: The run folder leads elsewhere.
    """
    if isfile(folder / "recipe.yaml"):
        check_run_folder(folder)
    newest: tuple[Store, str] | None = None
    for store in (Store(str(folder / "checkpoints")), Store(str(folder))):
        names = store.names()
        if names:
            newest = store, names[0]
            break
    final = folder / "final"
    steps = _json(folder / "result.json").get("steps")
    if any(isfile(final / file) for file in (ADAPTER, "config.json")) and (
        newest is None or (isinstance(steps, int) and step_of(newest[1]) <= steps)
    ):
        return final
    return None if newest is None else Path(newest[0].root, newest[1])


def _json(path: Path) -> JsonObject:
    """Read a JSON object; return an empty one if there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _adapter(folder: Path, depth: int) -> Source:
    config = _json(folder / ADAPTER)
    if not isfile(folder / ADAPTER_WEIGHTS):
        raise RecipeError(f"{folder} is an adapter without {ADAPTER_WEIGHTS}; save it as safetensors: pickles run code")
    problem = _unsupported(config)
    if problem is not None:
        raise RecipeError(f"{folder} {problem}, expected plain LoRA; merge it into its model with peft, and use that")
    shapes = _tensor_shapes(folder / ADAPTER_WEIGHTS)
    alpha = config.get("lora_alpha")
    with_magnitudes = any(MAGNITUDES in name for name in shapes)
    if bool(config.get("use_dora")) != with_magnitudes:
        expected, count = ("DoRA", "a") if with_magnitudes else ("plain LoRA", "no")
        raise RecipeError(
            f"{folder} has use_dora = {config.get('use_dora')!r}, expected {expected}, since {ADAPTER_WEIGHTS} has "
            f"{count} {MAGNITUDES}; correct {ADAPTER}"
        )
    rank = _rank(folder, config, shapes)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < LARGEST:
        raise RecipeError(f"{folder / ADAPTER} has lora_alpha = {alpha!r}, expected a number above 0")
    targets: Any = config.get("target_modules")
    if not _are_names(targets):  # a pattern
        targets = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in shapes]
    targets = sorted({*targets, *(config.get("target_parameters") or [])})
    lora = Lora(rank, float(alpha), targets, bool(config.get("use_rslora")), with_magnitudes)
    base = _base(folder, config.get("base_model_name_or_path"), depth)
    own = _json(folder / OVERRIDES)
    stored = own.pop("quantization_config", None)
    if stored not in (None, NF4):
        raise RecipeError(f"{folder / OVERRIDES} has quantization_config {stored}, expected none or {NF4}")
    quantization: Quantization | None = None if stored is None else "nf4"
    overrides = merge_overrides(base.overrides, own)
    scores = config.get("task_type") == "SEQ_CLS"
    patterns = {name: config[name] for name in PATTERNS if config.get(name)}
    return Source(
        str(folder), base, lora, scores=scores, overrides=overrides, patterns=patterns, quantization=quantization
    )


def _unsupported(config: JsonObject) -> str | None:
    """Return the option of an adapter's configuration that is not plain LoRA; None if all are."""
    names = [name for name in UNSUPPORTED if config.get(name)]
    if config.get("init_lora_weights") not in PLAIN_INITS:
        names.append("init_lora_weights")
    names += [name for name in PATTERNS if not _is_pattern(config.get(name), whole=name == "rank_pattern")]
    if config.get("target_parameters") and not _are_names(config["target_parameters"]):
        names.append("target_parameters")
    if names:
        return f"has {names[0]} = {config[names[0]]!r}"
    return None if config.get("peft_type") == "LORA" else f"is of type {config.get('peft_type')!r}"


def _are_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


def _rank(folder: Path, config: JsonObject, shapes: Mapping[str, list[int]]) -> int:
    """Return the rank of an adapter, after a comparison of all its ranks with its tensors."""
    rank, other_ranks = config.get("r"), config.get("rank_pattern") or {}
    is_stacked = bool(config.get("target_parameters") or other_ranks)
    matrices = [shape for name, shape in shapes.items() if ".lora_" in name and MAGNITUDES not in name]
    if type(rank) is not int or not all(_has_rank(shape, rank, is_stacked) for shape in matrices):
        raise RecipeError(f"{folder / ADAPTER} has r = {rank!r}, which is not the rank of the adapter's tensors")
    largest = max((size for shape in matrices for size in shape), default=0)
    for name, other in other_ranks.items():
        if other > largest:
            raise RecipeError(f"{folder / ADAPTER} has rank {other} for {show(name)}, which no tensor there has")
    return rank


def _has_rank(shape: list[int], rank: int, is_stacked: bool) -> bool:
    """Whether a matrix of an adapter has a rank, or a multiple of it if those of several weights may be stacked."""
    return rank in shape or (is_stacked and rank > 0 and any(size % rank == 0 for size in shape))


def _is_pattern(values: object, whole: bool) -> bool:
    """Whether a value of `PATTERNS` gives names numbers above 0, `whole` ones or any, or there is none."""
    types = {int} if whole else {int, float}
    return not values or (
        isinstance(values, dict)
        and all(PATTERN_NAME.fullmatch(name) for name in values)
        and all(type(value) in types and 0 < value < LARGEST for value in values.values())
    )


def _tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Read the shapes of the tensors in a safetensors file by name."""
    try:
        with safe_open(file, framework="pt") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError) as error:
        raise RecipeError(f"{file} cannot be read: {error}") from error


def _base(folder: Path, base: object, depth: int) -> Source:
    remedy = f"set base_model_name_or_path in {folder / ADAPTER} to the model's folder or its name on the hub"
    if not isinstance(base, str) or not base:
        raise RecipeError(f"the adapter {folder} does not name its base model; {remedy}")
    if isfile(folder / BASE / "config.json"):  # also if the adapter was moved
        return locate(_shipped_as(folder / BASE) or str(folder / BASE), depth + 1)
    is_hub_name = base.count("/") <= 1 and not base.startswith((".", "/", "~"))
    if not is_hub_name and not isdir(resolve(base)):
        raise RecipeError(f"the adapter {folder} belongs to {base!r}, which is not on this machine; {remedy}")
    return locate(base, depth + 1)


def _shipped_as(folder: Path) -> str | None:
    """Return the name of the shipped model that a folder is a copy of; None if it is no copy."""
    for name, shipped in SHIPPED.items():
        files = [path.name for path in shipped.iterdir() if isfile(path)]
        if not any(filecmp.cmpfiles(shipped, folder, files, shallow=False)[1:]):
            return name
    return None


def _checkpoint(checkpoint: CheckpointRef, depth: int) -> Source:
    """Read a checkpoint's base model and adapters from its recipe, without its tensors."""
    model = checkpoint.model()
    base = locate(model.path, depth + 1)
    overrides = merge_overrides(base.overrides, model.config)
    if model.lora is not None and base.lora is not None and base.base is not None:
        base = base.base  # the run trained these adapters further, so their values are in the checkpoint
    scores = model.scores
    return Source(
        checkpoint.location, base, model.lora, checkpoint=True, scores=scores, overrides=overrides,
        quantization=model.quantization,
    )  # fmt: skip


@lru_cache(maxsize=1)
def _remote(url: str) -> CheckpointRef:
    """Open and verify the checkpoint at a URL; the last one is cached."""
    return open_checkpoint(url)
