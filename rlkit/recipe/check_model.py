"""Checks of the models that a recipe names."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from rlkit.base.errors import show
from rlkit.base.installed import extra_command
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.loss import Inputs
from rlkit.recipe.fabric import FSDP2
from rlkit.recipe.recipe import Recipe, option

TEMPLATE_ARGUMENTS = {
    "conversation", "messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize",
    "continue_final_message", "return_dict", "return_tensors", "padding", "truncation", "max_length",
    "return_assistant_tokens_mask", "tokenizer_kwargs",
}  # fmt: skip
"""Arguments of transformers' `apply_chat_template` that are not template variables."""

FLASH = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
"""Implementations of attention that need a GPU and 16 bits: the module and the package of each."""

_CLASS = "it determines the class of the model; choose another model.path"
_LABELS = "set model.head instead"
_OUTPUTS = "rlkit chooses the outputs of the model"
_ROUTER = "set train.router_aux_loss_coef instead"
_CODE = "it would run code or read files; leave it out"
_ROPE = "set model.config.rope_parameters, which has rope_type, rope_theta and the options of the type"

REFUSED = {
    "architectures": _CLASS, "model_type": _CLASS, "is_decoder": _CLASS, "is_encoder_decoder": _CLASS,
    "id2label": _LABELS, "label2id": _LABELS, "num_labels": _LABELS, "problem_type": _LABELS,
    "output_attentions": _OUTPUTS, "output_hidden_states": _OUTPUTS, "return_dict": _OUTPUTS,
    "use_return_dict": _OUTPUTS, "chunk_size_feed_forward": _OUTPUTS,
    "auto_map": _CODE, "custom_pipelines": _CODE, "name_or_path": _CODE, "quantization_config": _CODE,
    "compression_config": _CODE, "backbone": _CODE, "backbone_config": _CODE, "backbone_kwargs": _CODE,
    "use_pretrained_backbone": _CODE, "use_timm_backbone": _CODE, "transformers_version": _CODE,
    "attn_implementation": "set model.attention instead", "dtype": "set model.dtype instead",
    "router_aux_loss_coef": _ROUTER, "output_router_logits": _ROUTER,
    "torch_dtype": "set model.dtype instead", "rope_scaling": _ROPE, "rope_theta": _ROPE,
}  # fmt: skip
"""Keys of a configuration that `model.config` may not set, and why not or what to do instead."""


def refusal(name: str) -> str | None:
    """Return the reason why `model.config` may not set a key, or what to do instead; None if it may."""
    if name.startswith("_") or name.endswith("_implementation"):
        return REFUSED.get(name, _CODE)
    if name.endswith(("_token_id", "_token_index")):
        return "ids of tokens are those of the tokenizer; change its files instead"
    return REFUSED.get(name)


def refused_keys(config: Mapping[str, object], prefix: str = "model.config") -> Iterator[str]:
    """Yield a message for each key that `model.config` may not set, and each value that no JSON file can hold."""
    for name, value in zip(map(str, config), config.values(), strict=True):
        key = f"{prefix}.{name}"
        inside_rope = prefix.rpartition(".")[2] == "rope_parameters" or ".rope_parameters." in prefix
        reason = None if inside_rope and name == "rope_theta" else refusal(name)
        if reason is not None:
            yield f"{key} is {show(value)}, but this key cannot be set: {reason}"
        elif isinstance(value, Mapping):
            yield from refused_keys(value, key)
        elif name == "max_position_embeddings" and isinstance(value, int) and value < 1:
            yield f"{key} is {show(value)}, expected a whole number from 1"
        elif not _is_json(value):
            yield f"{key} is {show(value)}, expected null, true or false, a finite number, text, or a list of these"


def _is_json(value: object) -> bool:
    """Whether a value is a scalar of JSON, or a list of such values."""
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | str)


def check_model(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of the model's options."""
    for name in recipe.model.chat_template_kwargs or ():
        if name in TEMPLATE_ARGUMENTS:
            yield f"model.chat_template_kwargs sets {name!r}, which rlkit sets itself; remove it"
    yield from refused_keys(recipe.model.config)
    yield from _check_head(recipe)
    yield from _check_attention(recipe)
    yield from _check_dora(recipe)
    yield from _check_division(recipe)
    yield from _check_router(recipe)
    if recipe.model.quantization is not None:
        yield from _check_quantization(recipe)


UNSCORED = (
    "critic", "kl_loss", "kl_reward", "reference", "correction", "rejection", "train.entropy_coef",
    "train.off_policy_mask_threshold", "train.mask_truncated", "train.router_aux_loss_coef", "validation.sampling",
)  # fmt: skip
"""Sections and options that concern sampled tokens and their log-probs."""


def _check_head(recipe: Recipe) -> Iterator[str]:
    loss, scores = recipe.loss, recipe.model.scores
    name = type(loss).__name__
    if Inputs.SCORES in loss.inputs and not scores:
        yield f"loss {name} trains a reward model, but model.head is {recipe.model.head!r}; set model.head: score"
    if not scores:
        return
    reward_model = "model.head is 'score': a reward model, which predicts no tokens, but"
    if Inputs.SCORES not in loss.inputs:
        yield (
            f"{reward_model} loss {name} reads their log-probs; choose loss: BradleyTerry, or BinaryCrossEntropy for "
            "turn rewards, or set model.head: lm"
        )
    for key in UNSCORED:
        if option(recipe, key):
            yield f"{reward_model} the recipe has `{key}`; remove it"


def _check_dora(recipe: Recipe) -> Iterator[str]:
    strategy = recipe.fabric.strategy
    if not isinstance(strategy, FSDP2) or strategy.tensor_parallel == 1:
        return
    for key, section in (("model", recipe.model), ("critic", recipe.critic)):
        if section is not None and section.lora is not None and section.lora.use_dora:
            yield (
                f"{key}.lora.use_dora is true, but fabric.strategy has tensor_parallel={strategy.tensor_parallel}, "
                "which divides the rows that DoRA scales; set tensor_parallel: 1, or use_dora: false"
            )


def _check_division(recipe: Recipe) -> Iterator[str]:
    strategy, engine = recipe.fabric.strategy, recipe.engine
    if not isinstance(strategy, FSDP2):
        return
    for key in ("tensor_parallel", "replicate"):
        if strategy.expert_parallel > 1 < getattr(strategy, key):
            degrees = f"expert_parallel={strategy.expert_parallel} and {key}={getattr(strategy, key)}"
            yield f"fabric.strategy has {degrees}, which do not go together; set one of them to 1"
    able = engine.capabilities
    sizes = {key: getattr(strategy, key) for key in ("tensor_parallel", "expert_parallel")}
    key, size = max(sizes.items(), key=lambda item: item[1])
    if size == 1 or Capability.READS_POLICY not in able:
        return
    divided = f"under {key}={size}: each token would wait for other ranks"
    if Capability.VALIDATION_ONLY not in able:
        yield (
            f"{type(engine).__name__} cannot sample from a policy {divided}; choose rollout.engine: SGLangServer, or "
            f"{key}: 1"
        )
    elif recipe.samples_validation:
        yield (
            f"validation cannot sample in this process {divided}; choose rollout.engine.validation: SGLangServer, or "
            "validation: null"
        )


def _check_quantization(recipe: Recipe) -> Iterator[str]:
    quantized = f"model.quantization is {recipe.model.quantization!r}, but"
    if recipe.model.lora is None:
        yield f"{quantized} all weights are trained, which needs more than 4 bits; add model.lora, or set it to null"
    strategy = recipe.fabric.strategy
    if isinstance(strategy, FSDP2) and strategy.tensor_parallel > 1:
        divided = f"tensor_parallel={strategy.tensor_parallel}, which divides matrices in 4 bits"
        yield f"{quantized} fabric.strategy has {divided}; set tensor_parallel: 1, or quantization: null"
    if find_spec("bitsandbytes") is None:
        yield f"{quantized} bitsandbytes is not installed: {extra_command('4bit')}"


def _check_router(recipe: Recipe) -> Iterator[str]:
    strategy = recipe.fabric.strategy
    if not recipe.train.router_aux_loss_coef or not isinstance(strategy, FSDP2):
        return
    for key in ("tensor_parallel", "sequence_parallel"):
        if getattr(strategy, key) > 1:
            yield (
                f"train.router_aux_loss_coef is {recipe.train.router_aux_loss_coef}, but fabric.strategy has {key}="
                f"{getattr(strategy, key)}, which divides what the router reads; set {key}: 1, or the coefficient to 0"
            )


def _check_attention(recipe: Recipe) -> Iterator[str]:
    name, fabric = recipe.model.attention, recipe.fabric
    if fabric.sequence_parallel > 1 and name not in {"auto", "sdpa"}:
        yield (
            f"model.attention is {name!r}, but fabric.strategy has sequence_parallel={fabric.sequence_parallel}, which "
            "divides sdpa alone; set model.attention: sdpa"
        )
    if name not in FLASH:
        return
    module, package = FLASH[name]
    if find_spec(module) is None:
        yield f"model.attention is {name!r}, but {module} is not installed: pip install {package}, or choose sdpa"
    if fabric.accelerator not in {"auto", "gpu", "cuda"}:
        yield (
            f"model.attention is {name!r}, which needs a GPU, but fabric.accelerator is {fabric.accelerator!r}; "
            "set model.attention: sdpa"
        )
    if not fabric.precision.startswith("bf16"):
        yield (
            f"model.attention is {name!r}, which computes only in 16 bits, but fabric.precision is "
            f"{fabric.precision!r}; set fabric.precision: bf16-mixed, or model.attention: sdpa"
        )
