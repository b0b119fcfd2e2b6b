"""The recipe: a run's typed parts, and the relations between them that must hold before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from rlkit.errors import RecipeError, show
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import RunPart
from rlkit.interfaces.task import Curriculum, Task
from rlkit.interfaces.tool import Tool
from rlkit.log import Log
from rlkit.ranges import outside
from rlkit.sections import (
    Conversation,
    Correction,
    Critic,
    Fabric,
    KLLoss,
    KLReward,
    Model,
    Profile,
    Reference,
    Rejection,
    Rollout,
    Save,
    Shaping,
    Train,
    Validation,
)

VALIDATION_FIGURES = (
    "accuracy", "accuracy_low", "accuracy_high", "finished_accuracy", "reward", "length", "stopped", "failed",
    "unscored",
)  # fmt: skip
"""What validation measures; the figures of sampled answers have `sampled_` before the name. There are also `pass@K` and
`maj@K` of sampled ones, `accuracy/SOURCE` where the prompts have several sources, and `strict_accuracy` where the
reward has the component `strict`."""


@dataclass
class Recipe:
    """All of a run."""

    model: Model
    task: Task
    rollout: Rollout
    reward: RewardManager
    advantage: AdvantageEstimator
    loss: PolicyLoss
    train: Train
    curriculum: Curriculum | None = None
    critic: Critic | None = None
    kl_loss: KLLoss | None = None
    kl_reward: KLReward | None = None
    reference: Reference | None = None
    shaping: Shaping | None = None
    correction: Correction | None = None
    rejection: Rejection | None = None
    tools: dict[str, Tool] | None = None
    parser: ToolParser | None = None
    interaction: Interaction | None = None
    environment: Environment | None = None
    conversation: Conversation | None = None
    validation: Validation | None = field(default_factory=Validation)
    save: Save = field(default_factory=Save)
    callbacks: list[Callback] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    profile: Profile | None = None
    fabric: Fabric = field(default_factory=Fabric)

    def parts(self) -> list[RunPart]:
        """Return the parts that may hold something, which is freed at the end of the run."""
        used = (self.rollout.engine, self.reward, self.advantage, self.loss, self.interaction, self.environment)
        read = (self.task, self.curriculum, self.rollout.filter, self.parser, *self.callbacks)
        held_out = {} if self.validation is None else self.validation.tasks or {}
        parts = (*used, *(self.tools or {}).values(), *read, *held_out.values())
        return [part for part in parts if part is not None]

    @property
    def groups_per_step(self) -> int:
        """How many groups a step trains on at most."""
        return self.train.prompts_per_step + (0 if self.rollout.replay is None else self.rollout.replay.size)

    @property
    def needs_reference(self) -> bool:
        """Whether something measures KL."""
        return self.kl_loss is not None or self.kl_reward is not None

    @property
    def needs_old_logps(self) -> bool:
        """Whether the trainer's log-probs must be known before learning starts.

        Otherwise those of the first learning pass serve.
        """
        weigh = self.correction is not None and self.train.old_logps == "recompute"
        wanted = Needs.OLD_LOGPS in self.advantage.needs or self.kl_reward or weigh or self.rejection
        recompute = not self.train.on_policy and self.train.old_logps == "recompute"
        return bool(wanted) or recompute


def check(recipe: Recipe) -> None:
    """Check the recipe without reading data or loading a model.

    Raises:
        RecipeError: Something does not fit; the message has a line for each thing, with the remedy.
    """
    checks = (
        _check_needs,
        _check_numbers,
        _check_validation,
        _check_best,
        _check_profile,
        _check_staleness,
        _check_model,
    )
    problems = list(outside(recipe)) or [problem for one in checks for problem in one(recipe)]
    if problems:
        raise RecipeError("\n".join(problems))


def _check_needs(recipe: Recipe) -> Iterator[str]:
    advantage, needs = type(recipe.advantage).__name__, recipe.advantage.needs
    if Needs.GROUPS in needs and recipe.rollout.group_size < 2:
        yield (
            f"advantage {advantage} compares the samples of a prompt, but rollout.group_size is "
            f"{recipe.rollout.group_size}; set rollout.group_size to 2 or more (usual: 8)"
        )
    if Needs.VALUES in needs and recipe.critic is None:
        yield (
            f"advantage {advantage} needs values, but the recipe has no `critic:` section; add one, or choose "
            "GRPO, RLOO"
        )
    if Needs.VALUES not in needs and recipe.critic is not None:
        yield f"the recipe has a `critic:` section, but advantage {advantage} reads no values; remove it, or choose GAE"
    if Needs.COMPONENTS in needs and recipe.reward.components is not None:
        missing = sorted(set(getattr(recipe.advantage, "weights", {})) - set(recipe.reward.components))
        if missing:
            yield (
                f"advantage {advantage} weighs the component {missing[0]!r}, but reward {type(recipe.reward).__name__} "
                f"has only: {', '.join(recipe.reward.components) or 'none'}; "
                "weigh one of these, or choose reward Composite"
            )
    for section in ("shaping", "kl_reward"):
        if Needs.COMPONENTS in needs and getattr(recipe, section) is not None:
            yield (
                f"advantage {advantage} reads the components of the reward, which `{section}:` leaves as they are; "
                "remove it" + (", or use `kl_loss:`" if section == "kl_reward" else "")
            )
    yield from _check_partners(recipe)
    yield from _check_reference(recipe)
    yield from _check_sampling(recipe)


def _check_partners(recipe: Recipe) -> Iterator[str]:
    if recipe.interaction is not None and recipe.environment is not None:
        yield "the recipe has both `interaction:` and `environment:`, but only one can answer the policy; remove one"
    if recipe.conversation is not None and not (recipe.tools or recipe.interaction or recipe.environment):
        yield (
            "the recipe has a `conversation:` section, but a question and its answer are one turn; remove it, or add "
            "`tools:`, `interaction:` or `environment:`"
        )
    if recipe.parser is not None and not recipe.tools:
        yield "the recipe has a `parser:` of tool calls, but no `tools:`; remove it, or add some"


def _check_reference(recipe: Recipe) -> Iterator[str]:
    kl = recipe.kl_loss
    if kl is not None and kl.importance_weighted and kl.estimator.endswith("+"):
        yield (
            f"kl_loss.estimator {kl.estimator} has the gradient of k2, to which importance_weighted would add that of "
            "the weights; choose k3, or set kl_loss.importance_weighted: false"
        )
    if recipe.reference is not None and not recipe.needs_reference:
        yield (
            "the recipe has a `reference:` section, but nothing measures KL; remove it, or add `kl_loss:` or "
            "`kl_reward:`"
        )
    if recipe.reference is not None and recipe.model.dtype != "float32":
        yield (
            f"`reference:` follows the policy, but with model.dtype: {recipe.model.dtype} its small moves round away; "
            "remove `reference:` or `model.dtype`"
        )
    if recipe.reference is not None and recipe.model.lora is not None:
        yield (
            "`reference:` cannot follow the policy under LoRA, where it is the same model without adapters; remove "
            "`reference:` or `model.lora`"
        )


def _check_sampling(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.rollout.sampling
    if recipe.rollout.oversample > 1 and Needs.GREEDY in recipe.advantage.needs:
        yield (
            f"rollout.oversample is {recipe.rollout.oversample}, but advantage {type(recipe.advantage).__name__} needs "
            "a greedy answer to every prompt as well; set rollout.oversample to 1"
        )
    if sampling.truncates:
        yield (
            f"rollout.sampling has top_p={sampling.top_p}, top_k={sampling.top_k} and min_p={sampling.min_p}, whose "
            "log-probs the trainer cannot match; set top_p: 1, top_k: 0 and min_p: 0, and truncate in "
            "validation.sampling only"
        )
    if sampling.temperature == 0:
        yield "rollout.sampling.temperature is 0, so all samples of a prompt would be equal; set it above 0 (usual: 1)"
    adapters_alone = recipe.model.lora is not None and (recipe.critic is None or recipe.critic.lora is not None)
    if recipe.fabric.precision == "bf16-true" and not adapters_alone:
        yield (
            "fabric.precision is 'bf16-true', in which most of AdamW's small updates of trained weights round away; "
            "set fabric.precision to 'bf16-mixed', and model.dtype: bfloat16 for frozen ones"
        )


def _check_validation(recipe: Recipe) -> Iterator[str]:
    validation = recipe.validation
    if validation is not None and not (validation.before or validation.every or validation.after):
        yield (
            "the section validation has before: false, every: 0 and after: false, so nothing is validated; set one of "
            "them, or validation: null"
        )
    if validation is not None and validation.tasks == {}:
        yield "validation.tasks names no task; add some, or set it to null for the recipe's own"
    for name in (validation and validation.tasks) or ():
        if not name or not name.isprintable():
            yield f"validation.tasks has the name {name!r}, expected printable characters"
    if validation is not None and validation.patience is not None:
        if not validation.every:
            yield "validation.patience counts the validations of steps; set validation.every to 1 or more"
        yield from _check_figure(validation, "validation.watch", validation.watch, validation.watch)


def _check_staleness(recipe: Recipe) -> Iterator[str]:
    rollout, name = recipe.rollout, "rollout.max_staleness"
    if not rollout.max_staleness:
        if rollout.lead:
            yield f"rollout.lead is {rollout.lead:g}, but {name} is 0; set {name} to 1 or more, or remove rollout.lead"
        if rollout.replay is not None:
            yield f"rollout.replay trains on groups of earlier steps, but {name} is 0; set {name} to 1 or more"
        return
    given = f"{name} is {rollout.max_staleness}, but"
    if rollout.lead is not None and rollout.lead > rollout.max_staleness:
        yield f"rollout.lead is {rollout.lead:g}, expected at most {name}, which is {rollout.max_staleness}"
    ratio = recipe.train.old_logps != "recompute" and recipe.loss.compares
    if recipe.correction is None and recipe.rejection is None and not ratio:
        yield (
            f"{given} nothing corrects for tokens of older weights: set train.old_logps: rollout (the loss clips the "
            "ratio of the weights that learn to those that sampled; only with losses of ratios) or loglinear (A-3PO), "
            "or add correction: {high: 2.0} (weighs each token by that ratio) or rejection: {high: 2.0} (leaves out "
            "the worst)"
        )
    if not (rollout.engine.interruptible or rollout.engine.beside):
        yield (
            f"{given} rollout.engine {type(rollout.engine).__name__} cannot be interrupted, nor does it sample while "
            "the trainer learns; choose TorchEngine"
        )
    if rollout.max_conversations is not None and not rollout.engine.beside:
        yield f"{given} rollout.max_conversations does not bound those that are interrupted; set rollout.lead instead"
    if rollout.oversample > 1:
        yield (
            f"{given} rollout.oversample is {rollout.oversample}, though no step waits for its slowest groups already: "
            "they go on in the next one; set rollout.oversample to 1"
        )
    if recipe.curriculum is not None:
        yield (
            f"{given} curriculum {type(recipe.curriculum).__name__} orders prompts by the outcomes of all steps "
            f"before, which are not known when prompts begin ahead; remove it, or set {name} to 0"
        )


def _check_profile(recipe: Recipe) -> Iterator[str]:
    steps = [] if recipe.profile is None else recipe.profile.steps
    if late := [step for step in steps if step > recipe.train.steps]:
        yield f"profile.steps has {late[0]}, expected steps up to train.steps, which is {recipe.train.steps}"


def _check_best(recipe: Recipe) -> Iterator[str]:
    """Check the name of the metric; one that is not among a step's metrics is refused after the first step."""
    key, validation = recipe.save.keep_best, recipe.validation
    if key is None:
        return
    kind, _, name = key.partition("/")
    if kind == "validation" and name:
        problems = list(_check_figure(validation or Validation(), "save.keep_best", key, name))
        if not problems and (validation is None or not validation.every):
            problems = [f"save.keep_best is {key!r}, but no step validates; set validation.every to 1 or more"]
        yield from problems
    elif not key.isprintable() or not (name or key == "accuracy"):
        yield f"save.keep_best is {key!r}, expected a figure of metrics.jsonl, such as validation/accuracy"


def _check_figure(validation: Validation, option: str, given: str, name: str) -> Iterator[str]:
    """Check the name of a figure of validation, where the higher is the better."""
    known, start = name.removeprefix("sampled_"), given.removesuffix(name)
    if known not in VALIDATION_FIGURES and not re.match(r"accuracy/.|strict_accuracy$|(pass|maj)@[0-9]+$", known):
        listed = ", ".join(f"{start}{figure}" for figure in VALIDATION_FIGURES)
        yield (
            f"{option} is {given!r}, expected one of {listed} (or {start}sampled_..., {start}sampled_pass@K, "
            f"{start}accuracy/SOURCE)"
        )
    elif name.startswith("sampled_") and not validation.samples:
        yield f"{option} is {given!r}, but validation.samples is 0; set it to 1 or more"


def _check_numbers(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if recipe.fabric.devices == []:
        yield "fabric.devices is [], expected a count, the indices of at least one device, or auto"
    if train.old_logps == "rollout" and recipe.correction is not None:
        yield (
            "train.old_logps is 'rollout', so ratios compare with the engine already, and `correction:` would weigh by "
            "trainer / engine a second time; remove `correction:`, or set train.old_logps: recompute"
        )
    if train.minibatches > train.prompts_per_step:
        yield (
            f"train.minibatches is {train.minibatches}, but a step has only train.prompts_per_step = "
            f"{train.prompts_per_step} prompts and a group is never divided; set it to {train.prompts_per_step} or less"
        )
    for name, section in (("train", train), ("critic", recipe.critic)):
        if section is not None and section.warmup_ratio is not None and section.warmup_steps:
            yield (
                f"{name}.warmup_steps is {section.warmup_steps} and {name}.warmup_ratio is {section.warmup_ratio}, but "
                "a warm-up has one length; remove one of them"
            )
        if section is not None and not section.optimizer.takes_shards and recipe.fabric.shards:
            yield (
                f"{name}.optimizer {section.optimizer.explain()} needs whole weights, of which fabric.strategy fsdp2 "
                "leaves shards on a rank; choose AdamW or Muon, or set fabric.strategy: ddp"
            )
    for key, bound in (("correction", "high"), ("rejection", "highest")):
        low, high = _value(recipe, f"{key}.low"), _value(recipe, f"{key}.{bound}")
        if low is not None and high is not None and low >= high:
            yield f"{key}.low is {low} and {key}.high is {high}, expected low < high"


def _value(recipe: Recipe, key: str) -> float | None:
    """Return an option by its key; None if its section is absent."""
    value: Any = recipe
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return cast("float | None", value)


def _check_model(recipe: Recipe) -> Iterator[str]:
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
