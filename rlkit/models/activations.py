"""The activations that a micro-batch saves for the backward pass, and the size of micro-batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlkit.interfaces.engine import Capability
from rlkit.models.size import find_config, kv_bytes, size_of
from rlkit.recipe import Fabric, Model, Recipe

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig

FULL = {"float32": (33, 16), "mixed": (31, 8), "half": (21, 8)}
ADAPTED = {"float32": (26, 16), "mixed": (25, 8), "half": (27, 12)}
"""Bytes saved for the backward pass per token and layer: (a, b) for a * hidden_size + b * intermediate_size.

Measured from the tensors that autograd saves for layers of Qwen2 0.5B and 7B, with all weights trained (`FULL`) and
with adapters only (`ADAPTED`); `half` means weights in bfloat16 without autocast, but for the adapters themselves. They
are within 2% of measurements on a GPU, where those were made (not yet for `FULL["half"]`).
"""

DORA = {"float32": 8, "mixed": 4, "half": 6}
"""Bytes that DoRA saves besides per token and output of an adapted layer: the base's output, and the adapter's."""


def activation_bytes(config: ModelConfig, computes: str, adapters: bool, dora: bool = False) -> tuple[int, int]:
    """Return the bytes saved for the backward pass per token and layer, and the number of layers.

    Args:
        config: Configuration of the text model.
        computes: `float32`, `mixed`, or `half` for weights in bfloat16 without autocast.
        adapters: Whether only adapters are trained.
        dora: Whether they are DoRA's, on all linear layers.
    """
    intermediate_size = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layers = int(config.num_hidden_layers)
    a, b = (ADAPTED if adapters else FULL)[computes]
    token_bytes = a * config.hidden_size + b * intermediate_size
    if dora:
        outputs = 3 * config.hidden_size + kv_bytes(config, 1, 1) // layers + 2 * intermediate_size
        token_bytes += DORA[computes] * outputs
    return token_bytes, layers


MAX_TOKENS_ON_CPU = 1280
"""Tokens of a micro-batch on a CPU: 2,048 are 1 to 2% faster for 10 million parameters, and take half as much again."""

MAX_TOKENS_ON_GPU, MAX_TOKENS_OF_SMALL_MODEL = 16384, 65536
"""Tokens of a micro-batch beyond which a GPU gets no faster: a small model's kernels take less time than their launch.
"""

MIN_TOKENS = 512
"""Tokens of a micro-batch below which every device gets slower."""

GPU_SHARE = 0.3
"""Share of a GPU's memory for the activations of a micro-batch."""

LEARNING_SHARE = 0.6
"""Share of a GPU's memory for all that learning takes, if the policy is the only large model there."""

WEIGHT_BYTES = 32
"""The most bytes of a parameter: of itself, its gradient, moments, average, reference and copies in 16 bits."""

FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}
"""Types of models whose activations are those measured: see `FULL`."""

HOST_BYTES = 2**30
"""Host memory for the activations of a micro-batch; small models reach full speed with less."""

ASSUMED_GPU_BYTES = 80 * 2**30
"""Assumed memory of a GPU if this machine has none."""


def precision_of(model: Model, fabric: Fabric) -> str:
    """Return the trainer's precision for `activation_bytes`: `mixed`, `float32` or `half`."""
    if fabric.precision.endswith("-mixed"):
        return "mixed"
    half = fabric.precision == "bf16-true" or (model.lora is not None and "bfloat16" in model.dtype)
    return "half" if half else "float32"


def frozen_bytes(model: Model, fabric: Fabric) -> int:
    """Return the bytes of one frozen weight."""
    return 2 if "bfloat16" in model.dtype or fabric.precision == "bf16-true" else 4


def token_limit(recipe: Recipe, gpu_bytes: int | None = None) -> int:
    """Return `train.max_tokens_per_micro_batch`, with `auto` resolved to a number.

    `auto` depends only on the recipe, the shape of the model, the kind of device and the number of ranks that share the
    tokens of rows, so a resumed run has the same micro-batches.

    Args:
        recipe: A checked recipe.
        gpu_bytes: Memory of the GPU to plan for; None for this machine's device.

    Raises:
        RecipeError: The model's configuration cannot be read.
    """
    train, model, fabric = recipe.train, recipe.model, recipe.fabric
    configured = train.max_tokens_per_micro_batch
    if configured != "auto":
        return configured
    config = find_config(model).get_text_config()
    dora = model.lora is not None and model.lora.use_dora
    layer_bytes, layers = activation_bytes(config, precision_of(model, fabric), model.lora is not None, dora)
    accelerator = "gpu" if gpu_bytes is not None else fabric.accelerator
    one_layer = train.checkpoint_activations or train.offload_activations
    token_bytes = layer_bytes * (1 if one_layer else layers)
    max_tokens, memory = MAX_TOKENS_ON_CPU, float(HOST_BYTES)
    if accelerator in {"gpu", "cuda"} or (accelerator == "auto" and torch.cuda.is_available()):
        gpu_bytes = gpu_bytes or _gpu_bytes()
        max_tokens, memory = MAX_TOKENS_ON_GPU, GPU_SHARE * gpu_bytes
        if not (one_layer or model.lora or model.scores):
            token_bytes += (4 if fabric.precision == "32-true" else 2) * config.vocab_size  # logits, which are kept
        alone = Capability.READS_POLICY in recipe.rollout.engine.capabilities and not (recipe.critic or recipe.teacher)
        if alone and not one_layer and not model.scores and config.model_type in FAMILIES:
            size = size_of(config, model.lora, model.trust_remote_code, vision=model.vision)
            max_tokens = MAX_TOKENS_OF_SMALL_MODEL
            memory = max(memory, LEARNING_SHARE * gpu_bytes - WEIGHT_BYTES * size.base)
    return max(MIN_TOKENS, min(max_tokens, int(memory / token_bytes))) * fabric.sequence_parallel


def _gpu_bytes() -> int:
    return int(torch.cuda.get_device_properties(0).total_memory) if torch.cuda.is_available() else ASSUMED_GPU_BYTES
