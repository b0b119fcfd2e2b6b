"""Loading the policy and its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rlkit.errors import CheckpointError, RecipeError
from rlkit.models.lora import add_lora
from rlkit.sections import Model

SHIPPED = {"tiny": Path(__file__).parent / "tiny", "tiny-tools": Path(__file__).parent / "tiny_tools"}
"""Models that come with rlkit: for additions, and for conversations with tools and games."""


def resolve(path: str) -> str:
    """Give the folder of a shipped model for its name, and any other path as it is."""
    if path in SHIPPED and not Path(path, "config.json").exists():
        return str(SHIPPED[path])
    return str(Path(path).expanduser()) if path.startswith("~") else path


def load_config(model: Model) -> Any:
    """Read the model's configuration; no weights.

    Raises:
        RecipeError: There is none at `model.path`.
    """
    from transformers import AutoConfig

    with _explained(model.path):
        return AutoConfig.from_pretrained(resolve(model.path), trust_remote_code=model.trust_remote_code)


def load_tokenizer(model: Model) -> Any:
    """Load the tokenizer.

    Raises:
        RecipeError: There is none, or it has no chat template.
    """
    from transformers import AutoTokenizer

    with _explained(model.path):
        tokenizer = AutoTokenizer.from_pretrained(resolve(model.path), trust_remote_code=model.trust_remote_code)
    if tokenizer.chat_template is None:
        raise RecipeError(
            f"model.path {model.path!r} has a tokenizer without a chat template, so messages cannot be rendered; "
            "choose an instruction-tuned model, or add a chat_template.jinja to its folder"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_policy(model: Model, seed: int = 0, empty: bool = False) -> Any:
    """Load a causal language model in float32, with fresh adapters, by the seed, if the recipe asks for LoRA.

    Args:
        model: Which one.
        seed: Of the adapters.
        empty: Leave the weights out, since another rank will send them.

    Raises:
        RecipeError: The model cannot be loaded, or an adapter's target names no module.
    """
    from transformers import AutoModelForCausalLM

    policy = _load(AutoModelForCausalLM, model, empty)
    policy.config.use_cache = False
    return policy if model.lora is None else add_lora(policy, model.lora, seed)


def load_backbone(model: Model, empty: bool = False) -> Any:
    """Load a model without its output layer, in float32; or `empty`, since another rank will send the weights.

    Raises:
        RecipeError: It cannot be loaded.
    """
    from transformers import AutoModel

    return _load(AutoModel, model, empty)


def _load(kind: Any, model: Model, empty: bool) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    options = {"dtype": torch.float32, "trust_remote_code": model.trust_remote_code}
    with _explained(model.path):
        if not empty:
            return kind.from_pretrained(resolve(model.path), **options).eval()
        with torch.device("meta"):
            return kind.from_config(load_config(model), **options).eval()


def context_length(config: Any) -> int:
    """Give the number of tokens that the model can attend to; a large number where it states none."""
    text = config.get_text_config()
    return int(getattr(text, "max_position_embeddings", None) or 1 << 20)


def stop_ids(model: Model, tokenizer: Any) -> frozenset[int]:
    """Give the ids that end a turn: those of the generation configuration and the tokenizer's end token."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(resolve(model.path)).eos_token_id
    except OSError:  # a model without one
        ids = load_config(model).get_text_config().eos_token_id
    listed = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*listed, tokenizer.eos_token_id) if i is not None)


@contextmanager
def _explained(path: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise RecipeError(
            f"model.path is {path!r}, which cannot be loaded: {first_line} Give a folder with a Hugging Face model, "
            "a name on the hub, or `tiny`"
        ) from error


def save_policy(policy: Any, tokenizer: Any, folder: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Write a Hugging Face folder: the model, or its adapter alone, with the tokenizer.

    It is written beside and then renamed, so that a folder of that name is always whole.

    Args:
        policy: The model.
        tokenizer: Its tokenizer.
        folder: Where to.
        weights: Whole tensors under the names of the policy's own, where it is sharded.

    Raises:
        CheckpointError: It cannot be written.
    """
    beside = folder.with_name(folder.name + ".partial")
    try:
        shutil.rmtree(beside, ignore_errors=True)
        policy.save_pretrained(beside, state_dict=weights)
        tokenizer.save_pretrained(beside)
        shutil.rmtree(folder, ignore_errors=True)
        beside.rename(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error
