"""slime's options that are read together: each function sets a part or a section of the recipe."""

from __future__ import annotations

import math
import re

from rlkit.base.errors import show
from rlkit_convert import slime_runtime
from rlkit_convert.conversion import Conversion
from rlkit_convert.parts import set_steps, truncation
from rlkit_convert.slime import ASYNCHRONOUS, GENERATE, PLUGIN, ROLLOUTS
from rlkit_convert.slime_method import advantage, correction, distillation, divergence, loss
from rlkit_convert.values import boolean, integer, number, text

SLICE = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]")
"""Rows of a file in slime's notation."""
QUANTIZED = re.compile(r"fp8|int4|int8|awq|gptq", re.IGNORECASE)
FINE_TUNING = "slime.rollout.sft_rollout.generate_rollout"
UNSAMPLED = ("rollout.group_size", "rollout.sampling.max_tokens", "train.entropy_coef", "train.old_logps")
"""Options of the recipe that fine-tuning has no use for."""
FULLY_ASYNCHRONOUS = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"
FILTERS = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
MOST_REFILLS = 1000
SCHEDULES = {"constant": "Constant", "linear": "Linear", "cosine": "Cosine"}
SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "max_response_len": "max_tokens"}
"""slime's options of sampling without `eval_` or `rollout_`, and rlkit's."""
MATHEMATICS = {
    "math": "MathReward also reads answers that are not in \\boxed{}",
    "deepscaler": "MathReward also reads answers without </think>, and those that are not in \\boxed{}",
    "dapo": "a wrong answer earns 0 instead of -1: advantages that are not divided by a standard deviation are half as "
    "large",
}
"""slime's rewards of mathematical answers, and where rlkit's differs."""
REWARDS = {
    "f1": "QAReward compares what is in <answer> tags; the F1 of a complete text is a PythonReward of your own",
    "gpqa": "ExactReward or MathReward, if the label is the letter of the right choice",
    "ifbench": "PythonReward, with a function that calls the package of IFBench",
    "random": "PythonReward, with a function that draws a number",
}
CUSTOM_REWARD = (
    "write f(text, answer, metadata) to a file, in place of f(args, sample): PythonReward with function: file.py:name"
)
SERVICE = 'its service must answer {"items": [...]} with {"scores": [...]}: rlkit plugins show RemoteReward'


def is_fine_tuning(conversion: Conversion) -> bool:
    """Whether the run trains on the completions in the rows."""
    return conversion.get("loss_type", text, "policy_loss") == "sft_loss"


def task(conversion: Conversion) -> None:
    """Set the task, its columns, and the chat template."""
    path = _rows(conversion, "prompt_data", conversion.get("prompt_data", text, ""), "train.max_rows")
    conversion.set("task", "HFDataset")
    if conversion.has("apply_chat_template"):
        conversion.note("apply_chat_template", "nothing to do: rlkit applies the model's chat template")
    if path:
        conversion.set("task.path", path, "prompt_data")
    if conversion.has("multimodal_keys"):  # slime trains all that --freeze-params-name-list does not name
        conversion.set("model.vision.train", True, "multimodal_keys")
    column = conversion.get("input_key", text, "input")
    if is_fine_tuning(conversion):
        conversion.set("task.answer_field", None, "label_key")
        if column in ("messages", "conversations"):
            conversion.note("input_key", "where turns have a flag step_loss_mask, rename it to `loss`")
        else:
            conversion.ask("input_key", "rename the column with the conversation to `messages`")
        return
    conversion.set("task.prompt_field", column, "input_key")
    conversion.set("task.answer_field", conversion.raw("label_key"), "label_key")
    if not conversion.get("apply_chat_template", boolean, False):
        conversion.set("model.chat_template", "plain", "apply_chat_template")
    total = conversion.get("rollout_max_context_len", integer, 0)
    limit = conversion.get("rollout_max_prompt_len", integer, total - 1)
    if limit > 0:
        sources = ("rollout_max_prompt_len", "rollout_max_context_len")
        conversion.set("rollout.max_prompt_tokens", limit, *sources)
        conversion.set("rollout.overlong", "drop", *sources)


def _rows(conversion: Conversion, source: str, value: str, limit: str) -> str:
    """Return the path of a file without slime's slice, of which the first rows become a limit."""
    selected = SLICE.fullmatch(value)
    if selected is None:
        return value
    path, start, end = selected.groups()
    if start in ("", "0") and end.isdigit() and int(end) > 0:
        conversion.set(limit, int(end), source)
    else:
        conversion.ask(source, f"save rows {start}:{end} of {show(path, 100)} to a file of their own")
    return path


def steps(conversion: Conversion) -> None:
    """Set mini-batches and the length of the run."""
    prompts = max(conversion.get("rollout_batch_size", integer, 1), 1)
    samples = prompts * conversion.get("n_samples_per_prompt", integer, 1)
    if conversion.has("num_steps_per_rollout"):
        conversion.carry("train.minibatches", "num_steps_per_rollout", integer, 1)
    elif conversion.has("global_batch_size"):
        update = max(conversion.get("global_batch_size", integer, samples), 1)
        conversion.set("train.minibatches", max(round(samples / update), 1), "global_batch_size", "rollout_batch_size")
        if samples % update:
            conversion.note("global_batch_size", f"{samples} samples of a step are not a multiple of {update}")
    elif conversion.has("rollout_batch_size"):
        conversion.ask(
            "rollout_batch_size", "without --global-batch-size Megatron takes micro_batch_size x the data-parallel "
            "ranks; set train.minibatches to the samples of a step divided by that"
        )  # fmt: skip
    if conversion.has("num_rollout"):
        conversion.carry("train.steps", "num_rollout", integer, 1)
    elif conversion.has("num_epoch"):
        path = SLICE.sub(r"\1", conversion.get("prompt_data", text, ""))
        set_steps(conversion, "num_epoch", conversion.get("num_epoch", number, 1.0), prompts, path)
    shuffled = conversion.get("rollout_shuffle", boolean, False)
    conversion.set("train.shuffle", shuffled, "rollout_shuffle")
    if conversion.has("rollout_seed"):
        if conversion.has("seed"):
            conversion.note("rollout_seed", "nothing to do: train.seed is also that of the data's order")
        else:
            conversion.carry("train.seed", "rollout_seed", integer, 0)


def optimizer(conversion: Conversion) -> None:
    """Set the policy's moments, warm-up and schedule."""
    betas = [conversion.get(f"adam_beta{i}", number, default) for i, default in ((1, 0.9), (2, 0.999))]
    conversion.set("train.optimizer.betas", betas, "adam_beta1", "adam_beta2")
    updates = max(conversion.recipe.get("train.minibatches", (1, ""))[0], 1)  # type: ignore[call-overload]
    iterations = conversion.get("lr_warmup_iters", integer, 0)
    if iterations > 0 and not conversion.has("lr_warmup_fraction"):
        conversion.set("train.warmup_steps", math.ceil(iterations / updates), "lr_warmup_iters")
    key = "lr_decay_style"
    schedule = SCHEDULES.get(conversion.get(key, text, "linear"))
    if schedule is None:
        conversion.ask(key, f"train.schedule: {', '.join(SCHEDULES.values())}, WarmupStableDecay or Polynomial")
        return
    conversion.set("train.schedule", schedule, key)
    floor, peak = conversion.get("min_lr", number, 0.0), conversion.get("lr", number, 1e-6)
    if schedule != "Constant" and conversion.has("min_lr") and 0 < floor <= peak:
        conversion.set("train.schedule.min_lr_ratio", float(f"{floor / peak:.6g}"), "min_lr", "lr")


def method(conversion: Conversion) -> None:
    """Set what is learnt: the completions in rows, or an estimator and a loss, KL and the correction."""
    if is_fine_tuning(conversion):
        conversion.set("rollout.engine", "Recorded", "loss_type", "rollout_function_path")
        conversion.set("loss", "CrossEntropy", "loss_type")
        for option in UNSAMPLED:
            _, sources = conversion.recipe.pop(option, (None, ""))
            for key in filter(conversion.has, sources.split(", ")):
                conversion.note(key, "nothing to do: fine-tuning samples nothing")
    else:
        distilled = distillation(conversion)
        advantage(conversion, distilled)
        loss(conversion)
        divergence(conversion)
        correction(conversion)
        if not distilled:
            reward(conversion)
    by_token = conversion.get("calculate_per_token_loss", boolean, False)
    aggregation = "token_mean" if by_token else "seq_mean_token_mean"
    conversion.set("train.aggregation", aggregation, "calculate_per_token_loss")


def reward(conversion: Conversion) -> None:
    """Set the reward; code and services of the user are named."""
    key = "rm_type"
    kind = conversion.get(key, text, "").removeprefix("boxed_")
    if conversion.has("custom_rm_path"):
        batch = "; BatchReward gets the samples of a prompt together"
        grouped = conversion.get("group_rm", boolean, False)
        conversion.ask("custom_rm_path", CUSTOM_REWARD + (batch if grouped else ""))
        if grouped:
            conversion.note("group_rm", "see custom_rm_path")
    elif kind in MATHEMATICS:
        conversion.set("reward", "MathReward", key)
        conversion.note(key, MATHEMATICS[kind])
    elif kind == "remote_rm":
        conversion.set("reward", "RemoteReward", key)
        conversion.carry("reward.url", "rm_url", text, "")
        conversion.ask(key, SERVICE)
    elif not conversion.is_unknown(key, "custom_rm_path"):
        remedy = "rows name it in metadata.rm_type: set `reward:`, or a Router of several"
        conversion.ask(key, REWARDS.get(kind, remedy if not kind else "set `reward:`"))
    for name in filter(conversion.has, ("reward_key", "eval_reward_key")):
        if kind in MATHEMATICS:
            conversion.note(name, "nothing to do: MathReward returns one number, and the accuracy is logged")
        else:
            conversion.ask(name, "a PythonReward returns a mapping with the reward under `reward`")


def rollout(conversion: Conversion) -> None:
    """Set the limits of sampling, the filter of groups, and how far rollouts run ahead."""
    key = "rollout_function_path"
    function = conversion.get(key, text, ROLLOUTS[0])
    if is_fine_tuning(conversion):
        if function != FINE_TUNING:
            conversion.ask(key, "write the conversations that it returns to a file with the column `messages`")
        return
    truncation(conversion, "rollout_")
    _stops(conversion, "rollout")
    _selection(conversion)
    ahead = function == FULLY_ASYNCHRONOUS
    if ahead:
        conversion.note(key, "rollouts run ahead by rollout.max_staleness steps at most, in slime without a limit")
    elif function not in ROLLOUTS:
        conversion.ask(key, GENERATE)
    if ahead or conversion.has(ASYNCHRONOUS):
        interval = max(conversion.get("update_weights_interval", integer, 1), 1)
        conversion.set("rollout.max_staleness", interval, ASYNCHRONOUS, key, "update_weights_interval")


def _stops(conversion: Conversion, section: str) -> None:
    """Set the texts and tokens that end a turn."""
    for source, option in (("rollout_stop", "stop"), ("rollout_stop_token_ids", "stop_ids")):
        if conversion.has(source):
            values = conversion.raw(source)
            values = values if isinstance(values, list) else [values]
            try:
                ends = [integer(value) if option == "stop_ids" else text(value) for value in values]
            except ValueError as error:
                conversion.ask(source, f"{error}; set {section}.sampling.{option}")
                continue
            conversion.set(f"{section}.sampling.{option}", ends, source)


def _selection(conversion: Conversion) -> None:
    """Set the filter of groups, and how many are started."""
    key = "dynamic_sampling_filter_path"
    path = conversion.get(key, text, "")
    if path == FILTERS:
        conversion.set("rollout.filter", "ZeroSignal", key)
        conversion.set("rollout.filter.max_refills", MOST_REFILLS, key)
        conversion.note(
            key, f"slime samples without a limit until a step is full; max_refills is {MOST_REFILLS}, the most"
        )
    elif path.startswith(FILTERS):
        conversion.ask(key, "rollout.filter: ZeroSignal leaves the place of a dropped group empty, or refills it")
    elif path:
        conversion.ask(key, PLUGIN.format("filter"))
    key = "over_sampling_batch_size"
    prompts = conversion.get("rollout_batch_size", integer, 0)
    share = conversion.get(key, integer, prompts) / max(prompts, 1)
    if 1 < share <= 2:
        conversion.set("rollout.oversample", share, key, "rollout_batch_size")
    elif share > 2:
        conversion.set("rollout.oversample", 2.0, key, "rollout_batch_size")
        conversion.ask(key, f"rollout.oversample is 2, at most; slime starts {share:g} times the prompts of a step")


def validation(conversion: Conversion) -> None:
    """Set the data of validation, and how it samples."""
    names = conversion.raw("eval_prompt_data")
    values = [str(name) for name in names] if isinstance(names, list) else [str(names)] if names is not None else []
    values = ["aime", *values] if len(values) == 1 else values
    interval = conversion.get("eval_interval", integer, 0)
    config = conversion.has("eval_config") or conversion.is_unknown("eval_prompt_data", "eval_config")
    if interval > 0 and is_fine_tuning(conversion):
        conversion.ask("eval_interval", "validation.every, with task.validation_path or task.validation_split")
    if interval < 1 or not (values or config) or is_fine_tuning(conversion) or len(values) % 2:
        conversion.set("validation", None, "eval_interval")
        return
    conversion.set("validation.every", interval, "eval_interval")
    if conversion.get("skip_eval_before_train", boolean, False):
        conversion.set("validation.before", False, "skip_eval_before_train")
    conversion.carry("validation.samples", "n_samples_per_eval_prompt", integer, 1)
    given = [name for name in SAMPLING if conversion.has(f"eval_{name}")]
    for name, option in SAMPLING.items() if given else ():
        source = f"eval_{name}" if name in given else f"rollout_{name}"
        if conversion.has(source):
            value = conversion.get(source, number if name in ("temperature", "top_p") else integer, 1)
            conversion.set(f"validation.sampling.{option}", max(value, 0), source)
    if given:
        _stops(conversion, "validation")
    _validation_data(conversion, dict(zip(values[::2], values[1::2], strict=True)))


def _validation_data(conversion: Conversion, paths: dict[str, str]) -> None:
    """Set the file of the task's validation rows, or several tasks by name."""
    source = "eval_prompt_data"
    fields = {}
    for key, option in (("input_key", "prompt_field"), ("label_key", "answer_field")):
        fields[option] = conversion.raw(f"eval_{key}", conversion.raw(key, conversion.defaults.get(key)))
    own = [key for key in ("eval_input_key", "eval_label_key") if conversion.has(key)]
    if len(paths) == 1 and not own:
        path = _rows(conversion, source, *paths.values(), "validation.limit")
        conversion.set("task.validation_path", path, source)
    elif paths:
        tasks = {}
        for name, value in paths.items():
            if SLICE.fullmatch(value):
                conversion.ask(source, f"save the rows of {show(value, 100)} to a file of their own")
            path = SLICE.sub(r"\1", value)
            tasks[name] = {"class_path": "HFDataset", "init_args": {"path": path, "validation_path": path, **fields}}
        conversion.set("validation.tasks", tasks, source, *own)


def weights(conversion: Conversion) -> None:
    """List the checkpoints that slime starts from, or continues, beside its Hugging Face folder."""
    if QUANTIZED.search(str(conversion.raw("hf_checkpoint"))):
        conversion.ask("hf_checkpoint", "set model.path to the weights without quantization, which slime trains")
    texts = {**conversion.options.values, **conversion.options.unresolved}
    loaded = texts.get("load")
    if loaded is not None and loaded in [texts.get(name) for name in ("save", "ref_load", "hf_checkpoint")]:
        conversion.notes["load"] = slime_runtime.RESUMED
        conversion.by_hand.discard("load")
    elif conversion.has("load"):
        conversion.ask("load", "if the folder has weights, slime starts with them: set model.path to them, in Hugging "
                               "Face's form")  # fmt: skip


def engine(conversion: Conversion) -> None:
    """Set the precision, the strategy, and the engine with its GPUs."""
    conversion.set("fabric.precision", "bf16-mixed")
    gpus, nodes = conversion.get("actor_num_gpus_per_node", integer, 8), conversion.get("actor_num_nodes", integer, 1)
    if gpus * nodes > 1:
        conversion.set("fabric.strategy", "fsdp2", "actor_num_gpus_per_node", "actor_num_nodes")
    if is_fine_tuning(conversion):
        return
    size = max(conversion.get("rollout_num_gpus_per_engine", integer, 1), 1)
    servers = conversion.get("rollout_num_gpus", integer, 0) // size
    if conversion.get("colocate", boolean, False):
        conversion.set("rollout.engine", "SGLangEngine", "colocate")
        conversion.set("rollout.engine.launch.release_memory", True, "colocate")
    else:
        conversion.set("rollout.engine", "SGLangServer", "rollout_num_gpus")
        if servers and nodes == 1:
            conversion.set("rollout.engine.servers", servers, "rollout_num_gpus", "rollout_num_gpus_per_engine")
            conversion.set("rollout.engine.first_gpu", gpus, "actor_num_gpus_per_node")
        elif servers:
            conversion.ask("rollout_num_gpus", "servers on several machines: rlkit docs clusters")
    if size > 1:
        conversion.carry("rollout.engine.launch.tensor_parallel", "rollout_num_gpus_per_engine", integer, 1)


def loggers(conversion: Conversion) -> None:
    """Set the loggers; metrics.jsonl and the terminal are always written."""
    parts: list[dict[str, object]] = []
    sources = []
    if conversion.get("use_wandb", boolean, False):
        names = {"project": "wandb_project", "group": "wandb_group", "entity": "wandb_team"}
        usable = {option: key for option, key in names.items() if conversion.has(key)}
        options = {option: conversion.get(key, text, "") for option, key in usable.items()}
        parts.append({"class_path": "Wandb", "init_args": {"project": "slime", **options}})
        sources += ["use_wandb", *usable.values()]
    if conversion.get("use_tensorboard", boolean, False):
        parts.append({"class_path": "TensorBoard", "init_args": {}})
        sources.append("use_tensorboard")
    if parts:
        conversion.set("log.loggers", parts, *sources)


FUNCTIONS = (task, steps, optimizer, method, rollout, validation, weights, engine, loggers)
