"""Tiny random vision-language models of several architectures, with their processors, built without downloads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit_authors.models import SIZES, build_tokenizer

if TYPE_CHECKING:
    from rlkit.interfaces.model import CausalLM, ModelConfig, Tokenizer

VOCABULARY = 300
"""Size of the models' vocabularies: the byte-level tokenizer has 263 tokens, and an architecture adds at most 8."""

TEMPLATE = """\
{%- macro render(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content or [] -%}
            {{- 'PLACEHOLDER' if part['type'] == 'image' else part['text'] -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\\nTools:\\n' -}}
    {%- for tool in tools -%}
        {{- tool | tojson + '\\n' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {{- '<|im_start|>' + message['role'] + '\\n' + render(message['content']) -}}
    {%- for call in message['tool_calls'] or [] -%}
        {%- set function = call['function'] or call -%}
        {{- '<tool_call>\\n{"name": "' + function['name'] + '", "arguments": ' -}}
        {{- function['arguments'] if function['arguments'] is string else function['arguments'] | tojson -}}
        {{- '}\\n</tool_call>' -}}
    {%- endfor -%}
    {{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""
"""ChatML: contents are texts or lists of typed parts, and the rendering of messages starts with that of fewer."""

TEXT: Mapping[str, object] = {**SIZES, "vocab_size": VOCABULARY, "bos_token_id": None}
TOWER: Mapping[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
QWEN_TOWER: Mapping[str, object] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 32,
}
QWEN_TOKENS: Mapping[str, str] = {
    "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
    "image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
}
QWEN_IDS: Mapping[str, str] = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
SQUARE: Mapping[str, int] = {"height": 32, "width": 32}


@dataclass(frozen=True)
class _Architecture:
    """What distinguishes the files of one architecture.

    Args:
        processor_class: The class of the processor.
        image_processor: The class of the image processor.
        placeholder: What the chat template renders for an image.
        tokens: The special tokens by the tokenizer's names for them.
        ids: The tokens whose ids the configuration has, by its names for them.
        text: Configuration of the text model.
        tower: Configuration of the vision tower.
        config: Further configuration of the model.
        images: Configuration of the image processor.
        processor: Configuration of the processor.
    """

    processor_class: str
    image_processor: str
    placeholder: str
    tokens: Mapping[str, str]
    ids: Mapping[str, str]
    text: Mapping[str, object] = field(default_factory=dict)
    tower: Mapping[str, object] = field(default_factory=lambda: TOWER)
    config: Mapping[str, object] = field(default_factory=dict)
    images: Mapping[str, object] = field(default_factory=dict)
    processor: Mapping[str, object] = field(default_factory=dict)


ARCHITECTURES: Mapping[str, _Architecture] = {
    "qwen2_5_vl": _Architecture(
        processor_class="Qwen2_5_VLProcessor",
        image_processor="Qwen2VLImageProcessor",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        tokens=QWEN_TOKENS,
        ids=QWEN_IDS,
        text={"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
        tower={**QWEN_TOWER, "fullatt_block_indexes": [1]},
        images={"patch_size": 14, "min_pixels": 28 * 28, "max_pixels": 28 * 28 * 16},
    ),
    "qwen3_vl": _Architecture(
        processor_class="Qwen3VLProcessor",
        image_processor="Qwen2VLImageProcessor",
        placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        tokens=QWEN_TOKENS,
        ids=QWEN_IDS,
        text={
            "head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
                "rope_theta": 1e4,
            },
        },
        tower={**QWEN_TOWER, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
        images={"patch_size": 16, "size": {"shortest_edge": 32 * 32, "longest_edge": 32 * 32 * 16}},
    ),
    "smolvlm": _Architecture(
        processor_class="SmolVLMProcessor",
        image_processor="SmolVLMImageProcessor",
        placeholder="<image>",
        tokens={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
            **{f"tile_{row}_{column}": f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)},
        },
        ids={"image_token_id": "<image>"},
        text={"model_type": "llama"},
        config={"scale_factor": 2},
        images={"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
        processor={"image_seq_len": 4},
    ),
    "gemma3": _Architecture(
        processor_class="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        placeholder="<start_of_image>",
        tokens={"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
        ids={
            "image_token_id": "<image_soft_token>",
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        text={"head_dim": 8, "sliding_window_pattern": 2},
        config={"mm_tokens_per_image": 4},
        images={"size": SQUARE},
        processor={"image_seq_length": 4},
    ),
    "llava": _Architecture(
        processor_class="LlavaProcessor",
        image_processor="CLIPImageProcessor",
        placeholder="<image>",
        tokens={"image_token": "<image>"},
        ids={"image_token_id": "<image>", "image_token_index": "<image>"},
        text={"model_type": "llama"},
        tower={**TOWER, "model_type": "clip_vision_model", "num_hidden_layers": 3, "projection_dim": 32},
        config={"image_seq_length": 16},
        images={"size": {"shortest_edge": 32}, "crop_size": SQUARE},
        processor={"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    ),
    "internvl": _Architecture(
        processor_class="InternVLProcessor",
        image_processor="GotOcr2ImageProcessor",
        placeholder="<IMG_CONTEXT>\\n",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        ids={"image_token_id": "<IMG_CONTEXT>"},
        text={"model_type": "qwen2"},
        tower={**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
        config={"image_seq_length": 4, "downsample_ratio": 0.5},
        images={"size": SQUARE, "crop_to_patches": True, "min_patches": 1, "max_patches": 4},
        processor={"image_seq_length": 4},
    ),
}

VISION_KINDS = tuple(ARCHITECTURES)
"""The architectures, as `model_type`."""


def save_random_vision_model(folder: Path, kind: str, seed: int = 0, **changes: object) -> Path:
    """Write a random vision-language model with its processor as a Hugging Face folder; return the folder.

    Args:
        folder: Where to write; it is created.
        kind: One of `VISION_KINDS`.
        seed: Seed of the weights.
        changes: Values of the text model's configuration that replace the tiny ones.

    Raises:
        ValueError: The kind is none of `VISION_KINDS`.
    """
    if kind not in ARCHITECTURES:
        raise ValueError(f"kind is {kind!r}, expected one of: {', '.join(VISION_KINDS)}")
    architecture = ARCHITECTURES[kind]
    tokenizer = _tokenizer(architecture)
    _random_model(_config(kind, architecture, tokenizer, changes), seed).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    images = {"image_processor_type": architecture.image_processor, **architecture.images}
    _write(folder / "preprocessor_config.json", {"processor_class": architecture.processor_class, **images})
    _write(
        folder / "processor_config.json", {"processor_class": architecture.processor_class, **architecture.processor}
    )
    return folder


def _tokenizer(architecture: _Architecture) -> Tokenizer:
    """Return the byte-level tokenizer with the architecture's special tokens, and its chat template."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    plain = build_tokenizer()
    core = plain.backend_tokenizer  # type: ignore[attr-defined]
    core.add_special_tokens([AddedToken(token, special=True) for token in architecture.tokens.values()])
    tokenizer: Tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=plain.eos_token,
        pad_token=plain.pad_token,
        model_max_length=4096,
        extra_special_tokens=dict(architecture.tokens),
    )
    tokenizer.chat_template = TEMPLATE.replace("PLACEHOLDER", architecture.placeholder)
    return tokenizer


def _config(kind: str, architecture: _Architecture, tokenizer: Tokenizer, changes: Mapping[str, object]) -> ModelConfig:
    from transformers import AutoConfig

    vocabulary = tokenizer.get_vocab()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    tied = {"tie_word_embeddings": changes["tie_word_embeddings"]} if "tie_word_embeddings" in changes else {}
    config: ModelConfig = AutoConfig.for_model(
        kind,
        text_config={**TEXT, **ends, **architecture.text, **changes},
        vision_config=dict(architecture.tower),
        **{name: vocabulary[token] for name, token in architecture.ids.items()},
        **architecture.config,
        **tied,  # which models read from the outer configuration
    )
    return config


def _random_model(config: ModelConfig, seed: int) -> CausalLM:
    """Return a model whose image features are about as large as its embeddings, so that an image changes the logits."""
    import torch
    from transformers import AutoModelForImageTextToText, GenerationConfig

    torch.manual_seed(seed)
    model: CausalLM = AutoModelForImageTextToText.from_config(config).eval()
    text_weights = {*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()}
    for weight in model.parameters():
        if weight not in text_weights and weight.ndim > 1:
            torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    text = config.get_text_config()
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    return model


def _write(path: Path, values: Mapping[str, object]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
