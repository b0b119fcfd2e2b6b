"""Saving the policy and its tokenizer, with the model card."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import yaml
from safetensors import SafetensorError
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.utils import cached_file

from rlkit.base.errors import CheckpointError, RecipeError
from rlkit.base.text import counted, part_name, safe
from rlkit.models import SHIPPED
from rlkit.models.lora import base_model, has_lora, score_head
from rlkit.models.source import ADAPTER, BASE, NF4, OVERRIDES, locate, merge_overrides
from rlkit.models.vision import reads_pictures
from rlkit.ops.quantization import QuantizedLinear
from rlkit.recipe import Recipe
from rlkit.types import JsonObject

PROCESSOR_FILES = ("preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json")
"""Files of a processor besides those of its tokenizer."""

LOAD = """```python
from {package} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""
BASE_FIRST = (
    f"rlkit reads `{OVERRIDES}` and changes the base model's configuration. Other programs do not: load the base model "
    "with these values first, or merge the adapter with `rlkit export --merge-lora`.\n"
)

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, Tokenizer


def save_policy(
    policy: CausalLM,
    tokenizer: Tokenizer,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
    overrides: JsonObject | None = None,
    *,
    ends: Collection[int] = (),
) -> None:
    """Write a Hugging Face folder with the tokenizer and the model, or only its adapter, atomically.

    Args:
        policy: The model.
        tokenizer: Its tokenizer.
        folder: The folder to write.
        weights: Full tensors by the policy's parameter names; required if it is sharded.
        overrides: Values of `model.config`, which an adapter's base has; None for none. A model has them in its own
            configuration.
        ends: The ids that end a turn in the chat template; generation stops at them too.

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
        stop_at(policy, ends)
        policy.save_pretrained(partial, state_dict=weights, **options)
        save_processor(base_model(policy), tokenizer, partial)
        if has_lora(policy):
            _add_shipped_base(partial, folder)
            if any(isinstance(layer, QuantizedLinear) for layer in policy.modules()):
                overrides = {**(overrides or {}), "quantization_config": NF4}
            if overrides:
                (partial / OVERRIDES).write_text(json.dumps(overrides, indent=2), encoding="utf-8")
                if os.path.isdir(partial / BASE):
                    base_model(policy).config.save_pretrained(partial / BASE)
        for weights_file in partial.rglob("*.safetensors"):  # which safetensors writes for their owner alone
            shutil.copymode(next(weights_file.parent.glob("*config.json")), weights_file)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk, this frees space for `result.json`
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def stop_at(policy: CausalLM, ends: Collection[int]) -> None:
    """Add the ids that end a turn to those at which the model's generation stops."""
    generation: GenerationConfig | None = getattr(base_model(policy), "generation_config", None)
    if generation is None:  # a classifier
        return
    known = generation.eos_token_id
    stops = known if isinstance(known, list) else [] if known is None else [known]
    missing = [end for end in ends if end not in stops]
    if missing:
        generation.eos_token_id = [*stops, *missing]


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


def model_card(recipe: Recipe, steps: int, validation: Mapping[str, Mapping[str, float] | None], verdict: str) -> str:
    """Return the text of `README.md`: Markdown after a header in YAML, as the hub reads it.

    Args:
        recipe: The run's recipe.
        steps: The number of steps that were made.
        validation: Metrics `before` and `after` training; None for a validation that was not made.
        verdict: A sentence on the change; empty if there was no comparison.
    """
    source = locate(recipe.model.path)
    is_adapter, is_scorer = recipe.model.lora is not None, recipe.model.scores
    header: dict[str, object] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["rlkit"]}
    if source.model.count("/") == 1 and not os.path.exists(source.model):
        header["base_model"] = source.model
    kind = "A reward model" if is_scorer else "A policy"
    base_model = as_code(os.path.basename(source.model) if os.path.isdir(source.model) else source.model)
    if is_adapter and recipe.model.path in SHIPPED:
        base_model += ", which ships with rlkit and is in `base/`"
    base_type = "" if recipe.model.quantization is None else f" on a base in {recipe.model.quantization} (QLoRA)"
    overrides = merge_overrides(source.overrides, recipe.model.config)
    facts = {
        "base model": base_model,
        "weights": "all" if recipe.model.lora is None else f"adapters: {recipe.model.lora}{base_type}",
        "data": as_code(part_name(recipe.task)),
        "reward": "none" if recipe.reward is None else as_code(part_name(recipe.reward)),
        "advantage": "none" if recipe.advantage is None else as_code(part_name(recipe.advantage)),
        "loss": as_code(part_name(recipe.loss)),
        "training": f"{counted(steps, 'step')} of {counted(recipe.train.prompts_per_step, 'prompt')}, "
        f"learning rate {recipe.train.lr:g}",
    }
    if overrides:
        facts["configuration"] = as_code(json.dumps(overrides)) + " in place of the base model's values"
    lines = [f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n", "# Model card\n"]
    lines.append(f"{kind} that rlkit trained. `recipe.yaml` of the run has every option.\n")
    lines.append("| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in facts.items()))
    rows = _validation_rows(validation)
    if rows:
        lines.append(f"| validation | before | after |\n|---|---|---|\n{rows}")
    if verdict:
        lines.append(f"{verdict}\n")
    if is_adapter and overrides and recipe.model.path not in SHIPPED:
        lines.append(BASE_FIRST)
    lines.append(load_snippet(is_adapter, is_scorer))
    return "\n".join(lines)


def load_snippet(is_adapter: bool, is_scorer: bool) -> str:
    """Return the Python that loads a model or an adapter, as a block of Markdown."""
    loader = "AutoModelForSequenceClassification" if is_scorer else "AutoModelForCausalLM"
    adapter_loader = loader.replace("AutoModel", "AutoPeftModel")
    package, loader = ("peft", adapter_loader) if is_adapter else ("transformers", loader)
    return LOAD.format(package=package, loader=loader)


def _validation_rows(validation: Mapping[str, Mapping[str, float] | None]) -> str:
    """Return the rows of accuracy and reward before and after training."""
    before, after = (validation.get(when) or {} for when in ("before", "after"))
    rows = ""
    for name in ("accuracy", "sampled_accuracy", "reward", "sampled_reward"):
        values = [f"{metrics[name]:.3f}" if name in metrics else "" for metrics in (before, after)]
        rows += f"| {name} | {values[0]} | {values[1]} |\n" if any(values) else ""
    return rows


def as_code(text: str) -> str:
    """Return a text as code in a cell of a table: one line, without what would end either."""
    return f"`{' '.join(safe(text).translate(str.maketrans('`|', '  ')).split())}`"
