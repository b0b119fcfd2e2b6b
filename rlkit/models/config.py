"""The configuration of a model: what transformers reads, with the values of `model.config` merged into it."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from rlkit.base.errors import RecipeError, UnavailableError, explain, shorten, show, unreachable
from rlkit.base.hub import work_offline_without_network
from rlkit.distributed.sequence import LENGTH_DEPENDENT, rope_sections
from rlkit.models import SHIPPED
from rlkit.models.source import Source, merge_overrides, source_of
from rlkit.models.vision import reads_pictures
from rlkit.ops.routes import EXPERT_COUNTS
from rlkit.recipe import Model
from rlkit.recipe.check_model import refusal, refused_keys
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, ModelConfig

ROPE = "rope_parameters"
OLD_ROPE = ("rope_scaling", "rope_theta")
"""Keys of older `config.json` files that transformers moves into `rope_parameters`."""

STRETCHED = ("llama3", "yarn")
"""Types of rotary embeddings that depend on the number of positions before they were stretched."""

OF_TYPES = {
    "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate",
    "mscale", "mscale_all_dim", "short_factor", "long_factor", "low_freq_factor", "high_freq_factor",
}  # fmt: skip
"""Parameters of rotary embeddings that only some types have."""


def load_config(model: Model) -> ModelConfig:
    """Read the model's configuration, with the values of `model.config`.

    Raises:
        RecipeError: There is no configuration at `model.path`, or `model.config` does not fit it.
    """
    from transformers import AutoConfig

    source = source_of(model)
    overrides = merge_overrides(source.overrides, model.config)
    with explained(model, source):
        if overrides:
            return deepcopy(_load_overridden(source.model, model.trust_remote_code, json.dumps(overrides)))
        config: ModelConfig = AutoConfig.from_pretrained(source.model, trust_remote_code=model.trust_remote_code)
    return config


@lru_cache(maxsize=8)
def _load_overridden(path: str, trust_remote_code: bool, overrides: str) -> ModelConfig:
    """Return the configuration at a path with overrides, which are JSON; it is shared, so copy it."""
    from transformers import AutoConfig, PreTrainedConfig

    config: ModelConfig = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    values, _ = PreTrainedConfig.get_config_dict(path)
    return override(config, values, json.loads(overrides), trust_remote_code)


def override(
    config: ModelConfig, values: JsonObject, overrides: JsonObject, trust_remote_code: bool = False
) -> ModelConfig:
    """Return a configuration with overrides.

    Args:
        config: The configuration that transformers makes of `values`.
        values: The content of `config.json`.
        overrides: The values of `model.config`.
        trust_remote_code: See `Model`.

    Raises:
        RecipeError: A key is unknown or refused, transformers refuses a value, or the weights would be other ones.
    """
    problems = list(refused_keys(overrides)) or list(_unknown(config, overrides, _keys(config)))
    if problems:
        raise RecipeError("\n".join(problems))
    subject = f"model.config is {show(overrides)}"
    try:
        with _rope_warnings() as before:
            type(config).from_dict(deepcopy(values))
        with _rope_warnings() as warnings:
            overridden: ModelConfig = type(config).from_dict(_merged(config, values, overrides))
        old_shapes = _shapes(config, trust_remote_code)
        shapes = _shapes(overridden, trust_remote_code)
    except Exception as error:  # transformers may raise anything for a value that it does not take
        cause = " ".join(explain(error).split())
        raise RecipeError(
            f"{subject}, with which {type(config).__name__} cannot be used: {cause}; correct the value"
        ) from error
    new_warnings = [text for text in warnings if text not in before]
    if new_warnings:
        raise RecipeError(f"{subject}, of which transformers says: {'; '.join(new_warnings)}; correct the value")
    problems = list(_changed(overridden, overrides))
    if problems:
        raise RecipeError("\n".join(problems))
    for name in {**old_shapes, **shapes}:
        if shapes.get(name) != old_shapes.get(name):
            raise RecipeError(
                f"{subject}, with which the weight {name} would be {_shape(shapes.get(name))}, but in model.path it is "
                f"{_shape(old_shapes.get(name))}; remove keys that change which weights the model has"
            )
    return overridden


def _merged(config: ModelConfig, values: JsonObject, overrides: JsonObject) -> JsonObject:
    """Return the content of `config.json` with overrides; sections and rotary parameters keep their other values."""
    merged: JsonObject = deepcopy(dict(values))
    names = getattr(config, "attribute_map", {})
    overrides = {names.get(name, name): value for name, value in overrides.items()}
    if "max_position_embeddings" in overrides and getattr(config, ROPE, None):
        overrides = {ROPE: {}, **overrides}  # or the former maximum, which they stretch, would be lost
    for key, value in overrides.items():
        current: Any = getattr(config, key, None)
        if hasattr(current, "to_dict"):
            section = merged.get(key)
            merged[key] = _merged(current, section if isinstance(section, dict) else current.to_dict(), value)
        elif key == ROPE:
            merged = {name: old for name, old in merged.items() if name not in OLD_ROPE}
            merged[key] = _merged_rope(config, current or {}, value)
        else:
            nested = isinstance(current, dict) and isinstance(value, dict)
            merged[key] = merge_overrides(current, value) if nested else value
    return merged


def _merged_rope(config: ModelConfig, current: JsonObject, value: JsonObject) -> JsonObject:
    """Return rotary parameters with overrides, for each type of layers if they are nested; a new type drops the old's.

    Without `original_max_position_embeddings` it is that of the configuration before its overrides.
    """
    if any(isinstance(part, dict) for part in current.values()):
        layers = {name: _merged_rope(config, current.get(name) or {}, part) for name, part in value.items()}
        return deepcopy(current) | layers
    kind = value.get("rope_type", current.get("rope_type"))
    if kind != current.get("rope_type"):
        current = {name: old for name, old in current.items() if name not in OF_TYPES}
    merged = merge_overrides(current, value)
    if kind in STRETCHED:
        merged.setdefault("original_max_position_embeddings", getattr(config, "max_position_embeddings", None))
    return merged


def _keys(config: ModelConfig, prefix: str = "") -> dict[str, object]:
    """Return a configuration's values by their dotted keys, without those that `model.config` refuses."""
    names: dict[str, str] = getattr(config, "attribute_map", {})
    own = {field.name for field in fields(config)} if is_dataclass(config) else set()
    own |= {key for key in vars(config) if not key.startswith("_")} | set(names)
    values: dict[str, object] = {}
    for key in sorted(own):
        value: Any = getattr(config, key, None)
        if refusal(key) is None:
            values[prefix + key] = value
            if hasattr(value, "to_dict"):
                values |= _keys(value, f"{prefix}{key}.")
            elif key == ROPE:
                values |= _rope_keys(value or {}, f"{prefix}{key}.")
    return values


def _rope_keys(value: JsonObject, prefix: str) -> dict[str, object]:
    from transformers.modeling_rope_utils import RopeParameters

    parts = {name: part for name, part in value.items() if isinstance(part, dict)}
    if not parts:
        return {f"{prefix}{name}": value.get(name) for name in {**RopeParameters.__annotations__, **value}}
    nested = {key: v for name, part in parts.items() for key, v in _rope_keys(part, f"{prefix}{name}.").items()}
    return nested | {f"{prefix}{name}": part for name, part in parts.items()}


def _unknown(config: ModelConfig, overrides: JsonObject, keys: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    """Yield a message for each key that the configuration lacks, and for each value in place of a section."""
    for name, value in overrides.items():
        key = f"{prefix}{name}"
        is_section = any(other.startswith(f"{key}.") for other in keys)
        if key not in keys:
            yield (
                f"model.config has the key {key!r}, which {type(config).__name__} lacks; did you mean "
                f"{_nearest(key, keys)!r}?"
            )
        elif is_section and isinstance(value, Mapping):
            yield from _unknown(config, dict(value), keys, f"{key}.")
        elif is_section:
            yield f"model.config.{key} is {show(value)}, expected a mapping of its keys to values"
        elif name == "rope_type" and value in LENGTH_DEPENDENT:
            yield (
                f"model.config.{key} is {show(value)}, with which log-probs of a row would depend on the other rows of "
                "its batch; choose yarn, linear, llama3 or default"
            )


def _nearest(key: str, keys: Mapping[str, object]) -> str:
    """Return the nearest of the keys: one of the same name in another section, or the most similar one."""
    name = key.rpartition(".")[2]
    namesakes = [other for other in keys if other.rpartition(".")[2] == name]
    siblings = [other for other in keys if other.rpartition(".")[0] == key.rpartition(".")[0]]
    return [*namesakes, *get_close_matches(key, siblings, 1, 0.6), *get_close_matches(key, keys, 1, 0.0)][0]


def _changed(config: ModelConfig, overrides: JsonObject, prefix: str = "") -> Iterator[str]:
    """Yield a message for each value that transformers has replaced by another."""
    for name, value in overrides.items():
        actual = config.get(name) if isinstance(config, dict) else getattr(config, name, None)
        key = f"{prefix}{name}"
        if isinstance(value, dict):
            yield from _changed(actual, value, f"{key}.")  # type: ignore[arg-type]
        elif (list(actual) if isinstance(actual, tuple) else actual) != value:
            yield (
                f"model.config.{key} is {show(value)}, but transformers makes it {show(actual)}, because of the other "
                "keys of the configuration; set these too, or remove it"
            )


def _shapes(config: ModelConfig, trust_remote_code: bool) -> dict[str, torch.Size]:
    """Return the shapes of a model's parameters by name; tied parameters appear once."""
    with torch.device("meta"):
        model = auto_class_of(config).from_config(deepcopy(config), trust_remote_code=trust_remote_code)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _shape(shape: torch.Size | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"


@contextmanager
def _rope_warnings() -> Iterator[list[str]]:
    """Collect what transformers warns of in rotary parameters, instead of printing it.

    That `factor` is not the ratio of the numbers of positions is left out: a model may train on less than it reads.
    """
    logger = logging.getLogger("transformers.modeling_rope_utils")
    level = logger.level
    texts: list[str] = []

    def collect(record: logging.LogRecord) -> bool:
        text = record.getMessage()
        if not text.startswith("The explicitly set RoPE scaling factor"):
            texts.append(text)
        return False

    logger.addFilter(collect)
    logger.setLevel(logging.WARNING)
    try:
        yield texts
    finally:
        logger.setLevel(level)
        logger.removeFilter(collect)


class AutoClass(Protocol):
    """An auto class of transformers, such as `AutoModelForCausalLM`."""

    def from_pretrained(self, path: str, **options: object) -> tuple[CausalLM, Mapping[str, Sequence[str]]]:
        """Return the model at a path, and with `output_loading_info` the names of weights that do not fit."""

    def from_config(self, config: ModelConfig, **options: object) -> CausalLM:
        """Return a model with random weights."""


def auto_class_of(config: ModelConfig) -> AutoClass:
    """Return the auto class of models that predict tokens, with or without pictures."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    auto_class: AutoClass = AutoModelForImageTextToText if reads_pictures(config) else AutoModelForCausalLM
    return auto_class


def experts_of(config: ModelConfig) -> int:
    """Return the largest number of experts of a layer; 0 if each token takes the same way."""
    text = config.get_text_config()
    layers = getattr(text, "layer_types", None) or ()
    is_dense = "mlp" in layers and "moe" not in layers  # Nemotron-H names a number all the same
    numbers = [getattr(text, name, None) for name in EXPERT_COUNTS if not is_dense]
    return max((number for number in numbers if isinstance(number, int) and number > 1), default=0)


def context_length(config: ModelConfig) -> int:
    """Return the maximum number of tokens of a row; a large number if the configuration has none.

    It is the model's number of positions. With `longrope` rotations it is their original length: a longer row would
    change the rotations of all rows in its batch. `dynamic` ones change only beyond the model's positions.

    Raises:
        RecipeError: The original length is no number of positions.
    """
    text = config.get_text_config()
    return min([_positions(text), *_original_lengths(text)])


def context_limit(config: ModelConfig) -> str | None:
    """Return a line on why the context is below the model's positions; None if it is not."""
    positions, context = _positions(config.get_text_config()), context_length(config)
    if context == positions:
        return None
    return (
        f"context: {context} of the model's {positions} positions; a longer row would change the rotations (longrope) "
        "of all rows in its batch"
    )


def _positions(text: ModelConfig) -> int:
    return int(getattr(text, "max_position_embeddings", None) or 1 << 20)


def _original_lengths(text: ModelConfig) -> Iterator[int]:
    """Yield the original lengths of `longrope` rotations, one for the model or one for each type of layers.

    Raises:
        RecipeError: One of them is no number of positions.
    """
    of_model = getattr(text, "original_max_position_embeddings", None)
    for parameters in rope_sections(getattr(text, ROPE, None) or getattr(text, "rope_scaling", None)):
        if parameters.get("rope_type", parameters.get("type")) == "longrope":
            length = parameters.get("original_max_position_embeddings") or of_model or _positions(text)
            if not isinstance(length, int | float) or not 1 <= length < 1 << 31:
                raise RecipeError(
                    f"the model's original_max_position_embeddings is {show(length)}, expected a number of positions"
                )
            yield int(length)


@contextmanager
def naming(option: str) -> Iterator[None]:
    """Replace `model.path` in the messages of errors by the option that has the path."""
    try:
        yield
    except RecipeError as error:
        raise type(error)(str(error).replace("model.path", option)) from error


@contextmanager
def explained(model: Model, source: Source) -> Iterator[None]:
    """Explain an error of loading; without a network, say how to get the model."""
    if not os.path.isdir(source.model):
        work_offline_without_network()
    try:
        yield
    except RecipeError:
        raise
    except Exception as error:  # transformers may raise anything if a configuration is malformed or unsupported
        first_line = shorten(str(error).strip().split("\n")[0], 300).rstrip(".")
        names = [] if os.path.isdir(source.location) else [*SHIPPED, *map(str, Path(model.path).parent.glob("*/"))]
        near = get_close_matches(model.path, names, 1, 0.5)
        hint = f" (did you mean {near[0]!r}?)" if near else "" if source.base is None else f", {source}"
        if unreachable(error):
            raise UnavailableError(
                f"model.path is {show(model.path)}{hint}, which cannot be loaded: it is no folder here, and the hub "
                "cannot be reached. Where there is a network, download it with "
                f"`hf download {show(source.model)[1:-1]} --local-dir FOLDER`, and set model.path to that folder"
            ) from error
        raise RecipeError(
            f"model.path is {show(model.path)}{hint}, which cannot be loaded: {first_line}. Use a folder with a model "
            "(as safetensors), an adapter or a run, a name on the hub, or `tiny`"
        ) from error
