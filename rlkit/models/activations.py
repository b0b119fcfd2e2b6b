"""What a micro-batch leaves for the backward pass, and how large it may be for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlkit.models.size import find_config
from rlkit.sections import Fabric, Model, Train

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig

WHOLE = {"float32": (33, 16), "mixed": (31, 8)}
ADAPTED = {"float32": (26, 16), "mixed": (25, 8), "half": (27, 12)}
"""Bytes that a token leaves for the backward pass in each layer: (a, b) for a * hidden + b * intermediate units.

Measured by the tensors that autograd saves for Qwen2's layers of 0.5B and 7B, with all weights trained and with
adapters alone; `half` are adapters on a base in bfloat16 without autocast. They are within 2% of what a GPU showed.
"""


def activation_bytes(config: ModelConfig, computes: str, adapters: bool) -> tuple[int, int]:
    """Return the bytes that a token leaves for the backward pass in each layer, and how many layers there are.

    Args:
        config: Of the text model.
        computes: `float32`, `mixed`, or `half` for adapters on a base in bfloat16 without autocast.
        adapters: Whether adapters alone are trained.
    """
    inner = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    a, b = (ADAPTED if adapters else WHOLE)[computes if adapters or computes != "half" else "float32"]
    return a * config.hidden_size + b * inner, int(config.num_hidden_layers)


MOST, MOST_ON_GPU = 2048, 16384
"""Tokens with which a device computes as fast as with more."""

LEAST = 512
"""Tokens below which every device computes more slowly."""

SHARE = 0.3
"""Of a GPU's memory, for what a micro-batch leaves."""

HOST_BYTES = 2**30
"""Of a host's memory, for what a micro-batch leaves: small models need less for full speed."""

ASSUMED_BYTES = 80 * 2**30
"""The assumed memory of a GPU where there is none."""


def precision_of(model: Model, fabric: Fabric) -> str:
    """Return how the trainer computes: `mixed`, `float32`, or `half` for adapters on a base in it without autocast."""
    if fabric.precision.endswith("-mixed"):
        return "mixed"
    return "half" if model.lora is not None and frozen_bytes(model, fabric) == 2 else "float32"


def frozen_bytes(model: Model, fabric: Fabric) -> int:
    """Return the bytes of a frozen weight."""
    return 2 if "bfloat16" in model.dtype or fabric.precision == "bf16-true" else 4


def token_limit(train: Train, model: Model, fabric: Fabric) -> int:
    """Return the tokens of a micro-batch: `train.max_tokens_per_micro_batch`, or what `auto` stands for.

    That follows from the shape of the model and the kind of device alone, so that a run that is resumed goes on with
    the same micro-batches.

    Raises:
        RecipeError: The model's configuration cannot be read.
    """
    given = train.max_tokens_per_micro_batch
    if given != "auto":
        return given
    config, adapters = find_config(model).get_text_config(), model.lora is not None
    each, layers = activation_bytes(config, precision_of(model, fabric), adapters)
    on_gpu = fabric.accelerator in {"gpu", "cuda"} or (fabric.accelerator == "auto" and torch.cuda.is_available())
    memory = SHARE * _gpu_bytes() if on_gpu else HOST_BYTES
    held = int(memory / (each * (1 if train.checkpoint_activations else layers)))
    return max(LEAST, min(MOST_ON_GPU if on_gpu else MOST, held))


def _gpu_bytes() -> int:
    if not torch.cuda.is_available():
        return ASSUMED_BYTES
    return int(torch.cuda.get_device_properties(0).total_memory)
