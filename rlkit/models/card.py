"""The model card of a trained policy: what a reader of its folder, or of its page on the hub, needs to know."""

from __future__ import annotations

import os
from collections.abc import Mapping

import yaml

from rlkit.base.text import counted, part_name, safe
from rlkit.models.source import SHIPPED, locate
from rlkit.recipe import Recipe

LOAD = """```python
from {package} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""


def model_card(recipe: Recipe, steps: int, validation: Mapping[str, Mapping[str, float] | None], verdict: str) -> str:
    """Return the text of `README.md`: Markdown after a header in YAML, as the hub reads it.

    Args:
        recipe: The run's recipe.
        steps: The number of steps that were made.
        validation: Metrics `before` and `after` training; None for a validation that was not made.
        verdict: A sentence on the change; empty if there was no comparison.
    """
    source = locate(recipe.model.path)
    is_adapter, is_scorer = recipe.model.lora is not None, recipe.model.head == "score"
    header: dict[str, object] = {"library_name": "peft" if is_adapter else "transformers", "tags": ["rlkit"]}
    if source.model.count("/") == 1 and not os.path.exists(source.model):
        header["base_model"] = source.model
    kind = "A reward model" if is_scorer else "A policy"
    base_model = _code(os.path.basename(source.model) if os.path.isdir(source.model) else source.model)
    if is_adapter and recipe.model.path in SHIPPED:
        base_model += ", which ships with rlkit and is in `base/`"
    facts = {
        "base model": base_model,
        "weights": f"adapters of rank {recipe.model.lora.rank}" if recipe.model.lora is not None else "all",
        "data": _code(part_name(recipe.task)),
        "reward": "none" if recipe.reward is None else _code(part_name(recipe.reward)),
        "advantage": "none" if recipe.advantage is None else _code(part_name(recipe.advantage)),
        "loss": _code(part_name(recipe.loss)),
        "training": f"{counted(steps, 'step')} of {counted(recipe.train.prompts_per_step, 'prompt')}, "
        f"learning rate {recipe.train.lr:g}",
    }
    lines = [f"---\n{yaml.safe_dump(header, sort_keys=True)}---\n", "# Model card\n"]
    lines.append(f"{kind} that rlkit trained. `recipe.yaml` of the run has every option.\n")
    lines.append("| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in facts.items()))
    rows = _validation_rows(validation)
    if rows:
        lines.append(f"| validation | before | after |\n|---|---|---|\n{rows}")
    if verdict:
        lines.append(f"{verdict}\n")
    loader = "AutoModelForSequenceClassification" if is_scorer else "AutoModelForCausalLM"
    adapter_loader = loader.replace("AutoModel", "AutoPeftModel")
    package, loader = ("peft", adapter_loader) if is_adapter else ("transformers", loader)
    lines.append(LOAD.format(package=package, loader=loader))
    return "\n".join(lines)


def _validation_rows(validation: Mapping[str, Mapping[str, float] | None]) -> str:
    """Return the rows of accuracy and reward before and after training."""
    before, after = (validation.get(when) or {} for when in ("before", "after"))
    rows = ""
    for name in ("accuracy", "sampled_accuracy", "reward", "sampled_reward"):
        values = [f"{metrics[name]:.3f}" if name in metrics else "" for metrics in (before, after)]
        rows += f"| {name} | {values[0]} | {values[1]} |\n" if any(values) else ""
    return rows


def _code(text: str) -> str:
    """Return a text as code in a cell of a table: one line, without what would end either."""
    return f"`{' '.join(safe(text).translate(str.maketrans('`|', '  ')).split())}`"
