"""Vision-language models: which module reads pictures, what it reads besides tokens, and which weights are trained."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rlkit.models.lora import base_model
from rlkit.models.processor import join_media
from rlkit.recipe import Lora, Vision

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, ModelConfig
    from rlkit.media import Media, MediaSegment

Backbone = Any
"""A module from token ids, and pixels, to hidden states."""

RowMedia = Sequence["Media | None"]
"""The pictures of each row; None for a row without."""


def reads_pictures(config: ModelConfig) -> bool:
    """Whether a model of this configuration reads pictures, and transformers has a class for it."""
    if not hasattr(config, "vision_config"):
        return False
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    return config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES


def backbone_of(policy: CausalLM) -> Backbone:
    """Return the module that computes hidden states: a vision-language model's own, which takes pixels as well."""
    model = base_model(policy)
    return model.base_model if reads_pictures(model.config) else model.get_decoder()


def language_model(policy: CausalLM) -> nn.Module:
    """Return the module with the text model's blocks; without a vision tower, the decoder itself."""
    return base_model(policy).get_decoder()


def freeze_vision(policy: CausalLM) -> CausalLM:
    """Freeze a vision tower and its projector, if a model has them, and return the model."""
    for weight in vision_weights(policy):
        weight.requires_grad_(False)
    return policy


def vision_weights(policy: CausalLM) -> list[nn.Parameter]:
    """Return the weights of a vision tower and its projector, adapters included; none of a model of texts alone."""
    if not reads_pictures(policy.config):
        return []
    text_weights = {id(weight) for weight in language_model(policy).parameters()}
    head = base_model(policy).get_output_embeddings()
    text_weights |= {id(weight) for weight in head.parameters()} if head is not None else set()
    return [weight for weight in policy.parameters() if id(weight) not in text_weights]


def zero_of_vision(policy: CausalLM) -> Tensor | float:
    """Return 0, with a gradient of 0 for all trained weights of a vision tower.

    Ranks exchange the gradients of all weights, but a pass over rows without pictures uses none of these, and some
    towers have layers that no pass uses.
    """
    trained = [weight for weight in vision_weights(policy) if weight.requires_grad]
    if not trained or not torch.is_grad_enabled():
        return 0.0
    return 0.0 * torch.stack([weight.sum() for weight in trained]).sum()


def language_targets(policy: CausalLM, lora: Lora, vision: Vision) -> Lora:
    """Return adapters of the text model alone, unless the vision tower is trained too or there is none.

    Args:
        policy: Without adapters.
        lora: Of the recipe; targets with a dot are full names, and stay.
        vision: Whether the vision tower is trained.
    """
    text = language_model(policy)
    prefix = next((name for name, module in policy.named_modules() if module is text), "")
    listed = [] if isinstance(lora.targets, str) else lora.targets
    if vision.train or not prefix or not reads_pictures(policy.config) or any("." in name for name in listed):
        return lora
    if lora.targets == "all-linear":
        linear = {name.rpartition(".")[2] for name, module in text.named_modules() if isinstance(module, nn.Linear)}
        listed = sorted(linear)
    elif not listed:
        return lora
    return replace(lora, targets=rf"{re.escape(prefix)}\.(.*\.)?({'|'.join(map(re.escape, listed))})")


def media_inputs(backbone: Backbone, tokens: Tensor, segments: Sequence[MediaSegment]) -> dict[str, Tensor]:
    """Return the inputs of a pass over tokens besides these and their positions; empty without pictures.

    Args:
        backbone: Of the model.
        tokens: [B,T] i64.
        segments: The pictures, in the order of their placeholders in the flattened tokens.
    """
    if not segments:
        return {}
    tensors = join_media([segment.tensors for segment in segments])
    inputs = {name: tensor.to(tokens.device, non_blocking=True) for name, tensor in tensors.items()}
    accepted = inspect.signature(type(backbone).forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):
        if name in accepted:
            inputs[name] = _type_ids(backbone, tokens)
    return inputs


def rotary_positions(backbone: Backbone, tokens: Tensor, media: RowMedia) -> Tensor | None:
    """Return the position ids [3,B,T] of tokens [B,T], by the model's own rule for pictures; None if it has none.

    The last position of a row plus 1 is that of its next token, whatever its place in the row.
    """
    if not hasattr(backbone, "get_rope_index") or not any(media):
        return None
    accepted = inspect.signature(backbone.get_rope_index).parameters
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand(3, *tokens.shape).clone()
    for row, row_media in enumerate(media):
        if row_media is None:
            continue
        row_tokens = tokens[row : row + 1]
        inputs = join_media([segment.tensors for segment in row_media.segments])
        inputs |= {"mm_token_type_ids": _type_ids(backbone, row_tokens)}
        options = {name: tensor.to(tokens.device) for name, tensor in inputs.items() if name in accepted}
        row_positions, _ = backbone.get_rope_index(row_tokens, **options)
        positions[:, row] = row_positions[:, 0]
    return positions


def picture_inputs(backbone: Backbone, tokens: Tensor, media: RowMedia | None) -> dict[str, Tensor]:
    """Return the inputs of a pass over padded rows [B,T] besides their tokens: pictures, and positions by a rule."""
    segments = [segment for row in media or () if row is not None for segment in row.segments]
    inputs = media_inputs(backbone, tokens, segments)
    positions = rotary_positions(backbone, tokens, media) if media is not None and segments else None
    return inputs if positions is None else inputs | {"position_ids": positions}


@torch.no_grad()
def sees_pictures_both_ways(backbone: Backbone) -> bool:
    """Whether the tokens of a picture also attend to later ones of it, as in Gemma 3.

    Tokens are said to be a picture's, without pixels: the mask alone changes the first of them.
    """
    accepted = inspect.signature(type(backbone).forward).parameters
    names = [name for name in ("mm_token_type_ids", "token_type_ids") if name in accepted]
    weight = next(backbone.parameters())
    if not names or weight.is_meta:
        return False
    tokens = torch.arange(3, 9, device=weight.device)[None]
    types = torch.tensor([[0, 1, 1, 1, 0, 0]], device=weight.device)
    plain = backbone(input_ids=tokens, use_cache=False).last_hidden_state[0, 1]
    marked = backbone(input_ids=tokens, use_cache=False, **dict.fromkeys(names, types)).last_hidden_state[0, 1]
    return not torch.allclose(plain, marked, rtol=1e-3, atol=1e-3)


def _type_ids(backbone: Backbone, tokens: Tensor) -> Tensor:
    """Return 1 for the tokens that stand for features of pictures, 0 for others."""
    token: int = getattr(backbone.config, "image_token_id", None) or backbone.config.image_token_index
    return (tokens == token).int()
