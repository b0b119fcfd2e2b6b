"""Checks of the model that a recipe names."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from rlkit.errors import show
from rlkit.recipe.recipe import Recipe

TEMPLATE_ARGUMENTS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are no variables of a template."""

FLASH = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
"""Implementations of attention for GPUs and 16 bits alone: the modules that they need, and the packages of these."""


def check_model(recipe: Recipe) -> Iterator[str]:
    """Yield what is wrong with the model's options."""
    path = recipe.model.path
    looks_local = path.startswith((".", "/", "~")) or (path.count("/") > 1 and "://" not in path)
    if looks_local and not Path(path).expanduser().is_dir():
        yield (
            f"model.path is {show(path)}, which is no folder; use a folder of a model, an adapter or a run, a hub "
            "name, or `tiny`"
        )
    for name in recipe.model.chat_template_kwargs or ():
        if name in TEMPLATE_ARGUMENTS:
            yield f"model.chat_template_kwargs sets {name!r}, which rlkit sets itself; remove it"
    yield from _check_attention(recipe)


def _check_attention(recipe: Recipe) -> Iterator[str]:
    name, fabric = recipe.model.attention, recipe.fabric
    if name not in FLASH:
        return
    module, package = FLASH[name]
    if find_spec(module) is None:
        yield f"model.attention is {name!r}, but {module} is not installed; install {package}, or choose sdpa"
    if fabric.accelerator not in {"auto", "gpu", "cuda"}:
        yield (
            f"model.attention is {name!r}, which needs a GPU, but fabric.accelerator is {fabric.accelerator!r}; "
            "set model.attention: sdpa"
        )
    if not fabric.precision.startswith("bf16"):
        yield (
            f"model.attention is {name!r}, which computes in 16 bits alone, but fabric.precision is "
            f"{fabric.precision!r}; set fabric.precision: bf16-mixed, or model.attention: sdpa"
        )
