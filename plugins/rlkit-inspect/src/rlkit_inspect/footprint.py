"""The memory that a run needs, estimated from the models' shapes, and whether a GPU has it. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import NamedTuple

import torch

from rlkit.base.limits import limit_mb
from rlkit.base.text import part_name
from rlkit.interfaces.engine import COPIES_SHARE
from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.optimizer import Optimizer
from rlkit.models.activations import activation_bytes, token_limit
from rlkit.models.size import PREFIX_SHARE, Size, cache_tokens, kv_bytes
from rlkit.ops.logps import chunk_bytes, kept_bytes
from rlkit.recipe import Critic, Train
from rlkit.registry import calling
from rlkit_inspect.estimate import Setting
from rlkit_inspect.optimizer_state import state_size

STATES = "weights and optimizer"
SAMPLING = "sampling, besides"
LEARNING = "learning, besides"
COPIES = "copies to sample through"


CONTEXT_MB = 1024
"""MiB that CUDA's context, its libraries and fragments take besides tensors."""


class MemoryTable(NamedTuple):
    """The estimated memory of a rank: the unit of sizes, and names with sizes, at last what the device has."""

    unit: str
    rows: list[tuple[str, str]]


def table(setting: Setting) -> MemoryTable:
    """Return the memory by phase, its peak, and what that is compared with: the GPU asked about, or this machine."""
    phases = memory(setting)
    device, device_mb, is_gpu = device_of(setting)
    sizes = {
        phase if phase != COPIES or setting.gpu is not None else f"{phase}, if they fit a quarter of a GPU": size
        for phase, size in phases.items()
    }
    sizes |= {"CUDA": CONTEXT_MB} if is_gpu else {}
    sizes["at the peak of a step"] = peak(phases) + CONTEXT_MB * is_gpu
    sizes[f"memory of {device}"] = device_mb
    return in_units(sizes, sizes["at the peak of a step"])


def in_units(sizes: Mapping[str, float], peak_mb: float) -> MemoryTable:
    """Return sizes in MiB as a table in MiB or GiB, whichever suits their peak."""
    if peak_mb < 2**10:
        return MemoryTable("MiB", [(name, f"{size:,.0f}") for name, size in sizes.items()])
    return MemoryTable("GiB", [(name, f"{size / 2**10:,.1f}") for name, size in sizes.items()])


def device_of(setting: Setting) -> tuple[str, float, bool]:
    """Return the name of the device that is planned for, its memory in MiB, and whether it is a GPU."""
    if setting.gpu is not None:
        return setting.gpu.name, setting.gpu.memory / 2**20, True
    if setting.recipe.fabric.accelerator != "cpu" and torch.cuda.is_available():
        return "this machine's GPU", torch.cuda.get_device_properties(0).total_memory / 2**20, True
    return "this machine (--gpu h100 plans for a GPU)", limit_mb(), False


def lines(setting: Setting) -> Iterator[str]:
    """Yield whether the memory fits the GPU that is asked about, and what it does not include."""
    if setting.gpu is None:
        return
    phases = memory(setting)
    gpu_gib = setting.gpu.memory / 2**30
    peak_gib = (peak(phases) + CONTEXT_MB) / 2**10
    is_enough = peak_gib <= gpu_gib
    verdict = f"yes, {gpu_gib - peak_gib:.1f} GiB free" if is_enough else f"no, {peak_gib - gpu_gib:.1f} GiB too much"
    yield f"fits {setting.gpu.name}, {gpu_gib:.0f} GiB: {verdict} at the peak of {peak_gib:.1f} GiB, CUDA included"
    if setting.is_sampled and not setting.reads_policy:
        yield f"not included: the server of {part_name(setting.recipe.rollout.engine)}, if it shares this GPU"


def misfit(setting: Setting) -> str | None:
    """Return the memory that the chosen GPU lacks, and the options that would make the run fit; None if it fits."""
    if setting.gpu is None:
        return None
    excess_mb = peak(memory(setting)) + CONTEXT_MB - setting.gpu.memory / 2**20
    if excess_mb <= 0:
        return None
    return (
        f"the run does not fit {setting.gpu.name}: {excess_mb / 2**10:.1f} GiB too much; to make it fit: "
        f"{_remedies(setting)}"
    )


def peak(phases: Mapping[str, float]) -> float:
    """Return the memory at the peak of a step: copies and the cache are released before it learns."""
    return phases[STATES] + max(phases[SAMPLING] + phases.get(COPIES, 0.0), phases[LEARNING])


def _remedies(setting: Setting) -> str:
    """Return the options that save memory and are not in use."""
    train, model = setting.recipe.train, setting.recipe.model
    smaller = _smaller_batches(setting)
    remedies = {
        "model.lora": model.lora is None,
        "model.dtype: bfloat16": model.lora is not None and setting.frozen_weight_bytes == 4,
        "model.quantization: nf4": model.lora is not None and model.quantization is None and setting.policy.linear > 0,
        "train.checkpoint_activations: true": not train.checkpoint_activations,
        "fabric.precision: bf16-true with train.optimizer: AdamW8bit": model.lora is None
        and setting.shards == 1
        and not setting.recipe.trains_bfloat16
        and setting.critic is None
        and train.ema is None
        and setting.recipe.reference is None,
        "fabric.precision: bf16-mixed": setting.precision == "float32",
        "fabric.strategy: fsdp2 on more GPUs": setting.shards == 1,
    }
    helpful = [option for option, helps in remedies.items() if helps]
    return ", ".join(helpful if smaller is None else [smaller, *helpful]) or "more GPUs"


def _smaller_batches(setting: Setting) -> str | None:
    """Return the options of smaller micro-batches and caches with which the run fits; None if it fits with none."""
    recipe, gpu = setting.recipe, setting.gpu
    if gpu is None:
        return None
    tokens = token_limit(recipe, gpu.memory)
    cached = getattr(recipe.rollout.engine, "max_kv_tokens", None)
    for divisor in (2, 4, 8, 16):
        options = {"train.max_tokens_per_micro_batch": max(tokens // divisor, setting.longest_row)}
        engine = copy(recipe.rollout.engine)
        if cached is not None:
            options["rollout.engine.max_kv_tokens"] = max(cached // divisor, setting.longest_row)
            vars(engine)["max_kv_tokens"] = options["rollout.engine.max_kv_tokens"]
        train = replace(recipe.train, max_tokens_per_micro_batch=options["train.max_tokens_per_micro_batch"])
        smaller = replace(recipe, train=train, rollout=replace(recipe.rollout, engine=engine))
        if peak(memory(replace(setting, recipe=smaller))) + CONTEXT_MB <= gpu.memory / 2**20:
            return " with ".join(f"{option}: {value}" for option, value in options.items())
    return None


def memory(setting: Setting) -> dict[str, float]:
    """Estimate a rank's memory in MiB by phase, without that of an engine's own server."""
    recipe, train = setting.recipe, setting.recipe.train
    models = [setting.policy] + ([] if setting.critic is None else [setting.critic])
    states = gradients = casts = 0.0
    for model, section in zip(models, (train, recipe.critic), strict=False):
        trained = trained_bytes(setting, model, section)
        states += trained.states
        gradients += trained.gradients
        casts = max(casts, trained.casts)
    apart = recipe.fabric.shards or train.offload_during_rollout
    shared = setting.critic is not None and recipe.critic is not None and recipe.critic.path is None and not apart
    if shared and all(model.lora for model in models):
        states -= setting.policy.base * setting.frozen_weight_bytes
    states += 4 * setting.policy.trained * (train.ema is not None)
    if recipe.needs_reference and not setting.policy.lora and "reference" not in recipe.placed:
        states += setting.policy.base * setting.frozen_weight_bytes
    step_tokens = setting.rows * setting.longest_row
    width = 2 if setting.half_base or setting.precision != "float32" else 4
    gpu_bytes = setting.gpu_bytes
    cached = getattr(recipe.rollout.engine, "max_kv_tokens", 0)
    if cached is None:
        cached = cache_tokens(setting.policy.config, width, gpu_bytes)
    cached = min(cached, step_tokens)
    if recipe.tools or recipe.interaction or recipe.environment or recipe.agent:
        cached += int(PREFIX_SHARE * cached)
    tokens = micro_batch_tokens(setting)
    activations = max(activation_peak(setting, model, tokens) for model in models)
    teacher = (
        step_tokens * 12.0 * recipe.loss.forward.teacher_top
    )  # ids and log-probs of a teacher's most likely tokens
    base_bytes = setting.policy.base_bytes(2 if setting.precision == "mixed" else 4, recipe.model.quantization)
    gathered = base_bytes if setting.shards > 1 else 0
    phases = {
        STATES: states / setting.shards,
        SAMPLING: kv_bytes(setting.policy.config, cached, width) + gathered,
        LEARNING: activations + gradients / setting.shards + casts / setting.shards + teacher,
    }
    copies = setting.policy.base * width
    if setting.samples_from_copies and (gpu_bytes is None or copies <= COPIES_SHARE * gpu_bytes):
        phases[COPIES] = float(copies)
    return {phase: size / 2**20 for phase, size in phases.items()}


class TrainedBytes(NamedTuple):
    """The bytes of a model that is trained: weights and optimizer, gradients, and copies that autocast keeps."""

    states: float
    gradients: float
    casts: float


def trained_bytes(setting: Setting, model: Size, section: Train | Critic | None) -> TrainedBytes:
    """Return the bytes of a model that a section trains, before they are divided among shards."""
    width = 2 if setting.recipe.trains_bfloat16 else 4
    quantization = setting.recipe.model.quantization if model is setting.policy else None
    base = model.base_bytes(setting.frozen_weight_bytes, quantization)
    states = base if model.lora else width * model.base
    states += width * model.lora
    states += 0 if section is None else optimizer_bytes(section.optimizer, model)
    casts = 0
    if setting.precision == "mixed":  # autocast keeps cast copies of weights that are not in bfloat16
        casts = 2 * model.base * (model.lora == 0 or setting.frozen_weight_bytes == 4)
    return TrainedBytes(states, width * model.trained, casts)


def micro_batch_tokens(setting: Setting) -> int:
    """Return the most tokens of a micro-batch; a row, or a group that is compared, may be longer than the limit."""
    recipe, row = setting.recipe, setting.longest_row
    indivisible = row * (setting.group_size if Inputs.GROUPS in recipe.loss.inputs else 1)
    limit = token_limit(recipe, setting.gpu_bytes)
    return min(max(limit, indivisible), setting.rows * row)


def optimizer_bytes(part: Optimizer, model: Size) -> float:
    """Return the bytes of an optimizer's state of a model.

    Raises:
        PartError: The part raised.
    """
    with calling(part, "make"):
        bytes_of = state_size(part)
    return sum(count * bytes_of(kind, shape) for (kind, shape), count in model.shapes.items())


def activation_peak(setting: Setting, model: Size, tokens: int) -> float:
    """Return the bytes that a micro-batch takes: what the backward pass needs, its gradients, logits.

    Ranks that share the tokens of rows have an equal part of them each.
    """
    tokens = -(-tokens // setting.recipe.fabric.sequence_parallel)
    hidden = model.config.hidden_size
    intermediate = getattr(model.config, "intermediate_size", None) or 4 * hidden
    layer, layers = activation_bytes(model.config, setting.precision, model.lora > 0, model.dora)
    if setting.recipe.train.offload_activations:
        layers = 1
    elif setting.recipe.train.checkpoint_activations:  # each layer's input, and one layer computed again
        half = model.lora or setting.precision == "half"
        layer += layers * hidden * (setting.frozen_weight_bytes if half else 4)
        layers = 1
    width = 4 if setting.precision == "float32" else 2
    gradients = 3 * width * intermediate + 16 * hidden  # of one layer, and what the last norm saves
    logits = width * tokens * model.outputs  # kept, and overwritten by their gradient
    if model.lora or logits > kept_bytes(setting.gpu_bytes):
        logits = 2 * min(4 * tokens * model.outputs, chunk_bytes(setting.gpu_bytes))  # a chunk, and its gradient
    norms = 4 * intermediate * (intermediate + 3 * hidden) * model.dora  # peft multiplies an identity by the adapter
    return float(tokens * (layer * layers + gradients) + logits + norms)
