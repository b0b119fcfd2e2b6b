"""The size of a model, without loading it."""

from __future__ import annotations

import json
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rlkit.distributed.fsdp2 import blocks
from rlkit.interfaces.optimizer import WeightKind
from rlkit.models.config import auto_class_of, experts_of, load_config, override
from rlkit.models.load import task_of, with_score_head
from rlkit.models.lora import add_lora
from rlkit.models.source import source_of
from rlkit.models.vision import freeze_vision, language_model, language_targets, reads_pictures
from rlkit.ops.quantization import BITS
from rlkit.recipe import Lora, Model, Vision
from rlkit.recipe.model import Quantization

if TYPE_CHECKING:
    from rlkit.interfaces.model import ModelConfig

SHAPES = Path(__file__).with_name("shapes.json")
"""The configurations of common models by their names on the hub, for estimates without access to it."""

CACHE_TOKENS = 262_144
"""The largest cache of TorchEngine on a CPU, by default."""

CACHE_SHARE = 0.2
"""The largest share of a GPU's memory that TorchEngine fills with its cache, by default."""

PREFIX_SHARE = 0.25
"""What TorchEngine keeps of conversations between their turns, as a share of its cache."""


@dataclass(frozen=True)
class Size:
    """The size of a model.

    Args:
        config: The configuration of the text model.
        outputs: The number of outputs of its head per token: the size of the vocabulary, or 1 for a score.
        base: The number of its parameters; tied parameters count once.
        linear: The number of weights that `model.quantization` keeps in 4 bits: those in the text model's linear layers
            besides the head; none of a mixture of experts.
        lora: The number of parameters of its adapters.
        shapes: The number of trained weights by kind and shape.
    """

    config: ModelConfig
    outputs: int
    base: int
    linear: int
    lora: int
    shapes: Counter[tuple[WeightKind, torch.Size]]

    @property
    def trained(self) -> int:
        """The number of trained parameters: those of the adapters, or all but a frozen vision tower's."""
        return sum(count * shape.numel() for (_, shape), count in self.shapes.items())

    def base_bytes(self, width: int, quantization: Quantization | None) -> float:
        """Return the bytes of a frozen base, with `width` bytes of a weight that is not quantized."""
        return self.base * width - (0 if quantization is None else self.linear * (width - BITS / 8))

    @property
    def dora(self) -> bool:
        """Whether its adapters train magnitudes, the only vectors that adapters have."""
        return self.lora > 0 and any(kind is WeightKind.VECTOR for kind, _ in self.shapes)


_SIZES: dict[str, Size] = {}
"""The sizes that were counted, by all on which they depend."""


def find_config(model: Model) -> ModelConfig:
    """Return a model's configuration, without access to the hub for the models in `shapes.json`.

    Raises:
        RecipeError: `model.path` cannot be read; UnavailableError if the hub cannot be reached.
    """
    from transformers import AutoConfig

    shape = known_shapes().get(source_of(model).model)
    if shape is None:
        return load_config(model)
    config: ModelConfig = AutoConfig.for_model(**shape)
    return override(config, shape, model.config) if model.config else config


@cache
def known_shapes() -> dict[str, dict[str, int]]:
    """Return the configurations of common models by name."""
    shapes: dict[str, dict[str, int]] = json.loads(SHAPES.read_text(encoding="utf-8"))
    return shapes


def size_of(
    config: ModelConfig,
    lora: Lora | None = None,
    trust_remote_code: bool = False,
    *,
    scores: bool = False,
    vision: Vision | None = None,
) -> Size:
    """Count a model's parameters, and those of its adapters, on the meta device; equal models are counted once.

    Args:
        config: Configuration of the model.
        lora: Shape of the adapters; None for a model without adapters.
        trust_remote_code: See `Model`.
        scores: Whether it is a reward model or a critic, whose head has one output.
        vision: Whether a vision tower is trained; None for the default.
    """
    vision = vision or Vision()
    description = repr((config.to_dict(), lora, trust_remote_code, scores, vision))
    if description not in _SIZES:
        _SIZES[description] = _count_weights(config, lora, trust_remote_code, scores, vision)
    return _SIZES[description]


def _count_weights(
    config: ModelConfig, lora: Lora | None, trust_remote_code: bool, scores: bool, vision: Vision
) -> Size:
    with torch.device("meta"):
        model = auto_class_of(config).from_config(deepcopy(config), trust_remote_code=trust_remote_code)
        if scores and not reads_pictures(config):  # no classifier of transformers reads pictures; the head is small
            model = with_score_head(model)
        base = _count(model)
        layers = language_model(model).modules()
        linear = 0 if experts_of(config) else sum(x.weight.numel() for x in layers if type(x) is nn.Linear)
        if lora is None:
            trained = model if vision.train else freeze_vision(model)
        else:
            trained = add_lora(model, language_targets(model, lora, vision), task=task_of(model))
    shapes = Counter((kind, weight.shape) for kind, weights in by_kind(trained).items() for weight in weights)
    text = config.get_text_config()
    return Size(text, 1 if scores else text.vocab_size, base, linear, _count(trained) - base, shapes)


def by_kind(module: nn.Module) -> dict[WeightKind, list[Tensor]]:
    """Return the trainable weights by kind, in the order of the module."""
    in_blocks = {id(weight) for block in blocks(module) for weight in block.parameters()}
    kinds: dict[WeightKind, list[Tensor]] = {kind: [] for kind in WeightKind}
    for weight in module.parameters():
        if weight.requires_grad:
            kind = WeightKind.MATRIX if id(weight) in in_blocks and weight.dim() == 2 else WeightKind.EMBEDDING
            kinds[kind if weight.dim() >= 2 else WeightKind.VECTOR].append(weight)
    return kinds


def _count(policy: nn.Module) -> int:
    return sum(int(p.numel()) for p in policy.parameters())


def cache_tokens(config: ModelConfig, width: int, gpu_bytes: float | None) -> int:
    """Return the tokens that TorchEngine's cache may hold by default.

    Args:
        config: The policy's.
        width: Bytes of a number.
        gpu_bytes: Memory of the GPU; None on a CPU.
    """
    return CACHE_TOKENS if gpu_bytes is None else int(CACHE_SHARE * gpu_bytes / kv_bytes(config, 1, width))


def kv_bytes(config: ModelConfig, tokens: int, width: int = 4) -> int:
    """Return the bytes of a key-value cache for a number of tokens, with `width` bytes per number.

    A model without attention counts as one with a single head.
    """
    queries = getattr(config, "num_attention_heads", None) or 1
    heads = int(getattr(config, "num_key_value_heads", None) or queries)
    size = int(getattr(config, "head_dim", None) or config.hidden_size // queries)
    return tokens * int(config.num_hidden_layers) * 2 * heads * size * width
