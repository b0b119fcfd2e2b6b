"""TRL's options that are read together: each function sets a part or a section of the recipe."""

from __future__ import annotations

import re
from math import ceil

from rlkit_convert import trl_distillation, trl_recorded
from rlkit_convert.conversion import Conversion
from rlkit_convert.parts import PROJECT_LOGGERS, loggers, set_steps, truncation
from rlkit_convert.trl import steps_between
from rlkit_convert.trl_trainer import AGGREGATION, DISTILLED, RECORDED, TRAINER
from rlkit_convert.values import boolean, choice, integer, number, number_or_text, text

UPDATE = ("per_device_train_batch_size", "num_processes", "gradient_accumulation_steps")
ROLLOUT = (*UPDATE, "steps_per_generation", "generation_batch_size", "num_mini_batches")
"""Options that set the number of completions of a rollout."""
SCALES: dict[str, bool | str] = {
    "group": True, "True": True, "true": True, "batch": "batch", "none": False, "False": False, "false": False,
}  # fmt: skip
"""TRL's values of `scale_rewards`, and rlkit's of `advantage.scale_by_std`."""
PAIRED = "online_dpo"
"""The trainer that compares two samples of a prompt, without an advantage."""
LOGGERS = {**PROJECT_LOGGERS, "mlflow": ("MLflow", ""), "none": ("", "")}
PEFT_TARGETS = (
    "without lora_target_modules peft chooses by the model's type, such as [q_proj, v_proj] for Llama and Qwen2; set "
    "model.lora.targets, which is all-linear by default"
)
REWARDS = "write f(text, answer), or a function in TRL's form, to a file; PythonReward with function: file.py:name"


def trainer(conversion: Conversion) -> str:
    """Return the trainer of the options."""
    return str(conversion.options.values[TRAINER])


def task(conversion: Conversion) -> None:
    """Set the task; a prompt that a script makes of other columns needs their names."""
    prompt_options = [key for key in ("map.prompt", "map.template") if conversion.has(key)]
    conversion.set("task", "HFDataset" if prompt_options else "TRL", *prompt_options)
    if prompt_options and not conversion.has("map.answer"):
        conversion.note(prompt_options[0], "task.answer_field is `answer`; name the column, or null if there is none")
    elif conversion.has("map.answer") and not prompt_options:
        conversion.ask("map.answer", "task HFDataset has answer_field; TRL reads `answer`")
        conversion.leave_out("task.answer_field")


def _rollout(conversion: Conversion) -> tuple[int, int]:
    """Return the completions of a rollout, and the optimizer updates of one pass over them."""
    device, processes, accumulated = (max(conversion.get(name, integer, 1), 1) for name in UPDATE)
    per_update = device * processes * accumulated
    if trainer(conversion) == "ppo":
        minibatches = max(conversion.get("num_mini_batches", integer, 1), 1)
        return per_update * minibatches, minibatches
    completions = device * processes * max(conversion.get("steps_per_generation", integer, accumulated), 1)
    if trainer(conversion) != "gold":  # there it counts the prompts of a process
        completions = conversion.get("generation_batch_size", integer, completions)
    return completions, max(round(completions / per_update), 1)


def _set_rollouts(conversion: Conversion, key: str, steps: int, source: str, *also: str) -> None:
    """Set an option that counts rollouts from one that counts optimizer updates; PPO's options count rollouts too."""
    updates = 1
    if trainer(conversion) != "ppo":
        if conversion.is_unknown(*ROLLOUT, "num_iterations"):
            conversion.leave_out(key)
        updates = _rollout(conversion)[1] * max(conversion.get("num_iterations", integer, 1), 1)
    conversion.set(key, ceil(steps / updates), source, *also)


def batches(conversion: Conversion) -> None:
    """Set a step's prompts, samples, mini-batches and epochs; TRL counts completions and optimizer steps."""
    completions, updates = _rollout(conversion)
    if trainer(conversion) in (*RECORDED, "gkd", "distillation", PAIRED):  # whose batches count prompts
        conversion.set("train.prompts_per_step", completions, *UPDATE)
        if trainer(conversion) not in RECORDED:
            conversion.set("rollout.group_size", 2 if trainer(conversion) == PAIRED else 1, TRAINER)
        _length_of_run(conversion, completions, completions)
        return
    if trainer(conversion) == "ppo":
        group_size = 1
        conversion.carry("train.epochs", "num_ppo_epochs", integer, 4)
        conversion.set("rollout.group_size", 1)
    else:
        key = "rloo_k" if conversion.has("rloo_k") else "num_generations"
        group_size = max(conversion.get(key, integer, 8), 1)
        conversion.set("rollout.group_size", group_size, key)
        conversion.carry("train.epochs", "num_iterations", integer, 1)
    prompts = max(completions // group_size, 1)
    conversion.set("train.prompts_per_step", prompts, *ROLLOUT)
    conversion.set("train.minibatches", min(updates, prompts), *ROLLOUT)
    if prompts * group_size != completions:
        why = f"{completions} completions are not a multiple of {group_size}; prompts_per_step is {prompts}"
        conversion.note("num_generations", why)
    if trainer(conversion) == "rloo" and updates * conversion.get("num_iterations", integer, 1) > 1:
        why = "TRL's RLOO clips the ratio of whole answers, ClipLoss of tokens: equal in a rollout's first update only"
        conversion.note("epsilon", f"{why}; loss GSPO is nearest, or set train.minibatches and train.epochs to 1")
    if updates > prompts:
        why = f"{updates} updates of {prompts} prompts: rlkit does not split a group of samples"
        conversion.note("gradient_accumulation_steps", why)
    _length_of_run(conversion, completions, prompts)


def _length_of_run(conversion: Conversion, completions: int, prompts: int) -> None:
    """Set the number of devices, and of rollouts if it is known."""
    if conversion.get("num_processes", integer, 1) > 1:
        conversion.carry("fabric.devices", "num_processes", integer, 1)
    sizes = (*ROLLOUT, "num_generations", "rloo_k", "num_iterations", "num_ppo_epochs")
    if conversion.is_unknown(*sizes, "max_steps", "total_episodes"):
        conversion.leave_out("train.steps")
        return
    max_steps = conversion.get("max_steps", integer, -1)
    episodes = conversion.get("total_episodes", integer, 0)
    if max_steps > 0:
        _set_rollouts(conversion, "train.steps", max_steps, "max_steps")
    elif episodes > 0:
        conversion.set("train.steps", max(ceil(episodes / max(completions, 1)), 1), "total_episodes")
    else:
        data_epochs = conversion.get("num_train_epochs", number, 3.0)
        set_steps(conversion, "num_train_epochs", data_epochs, prompts, conversion.raw("dataset_name"))


def model(conversion: Conversion) -> None:
    """Set adapters, the data type of frozen weights, and the precision."""
    if conversion.get("use_peft", boolean, False):
        conversion.carry("model.lora.rank", "lora_r", integer, 16, "use_peft")
        conversion.carry("model.lora.alpha", "lora_alpha", number, 32.0)
        for name in ("use_rslora", "use_dora"):
            if conversion.get(name, boolean, False):
                conversion.set(f"model.lora.{name}", True, name)
        if conversion.has("lora_target_modules"):
            targets = conversion.options.values["lora_target_modules"]
            modules = [str(module).strip(", ") for module in targets] if isinstance(targets, list) else targets
            conversion.set("model.lora.targets", modules, "lora_target_modules")
        elif not conversion.is_unknown("lora_target_modules"):
            conversion.ask("use_peft", PEFT_TARGETS)
        for name in ("lora_dropout", "lora_modules_to_save", "lora_target_parameters"):
            if trainer(conversion) == "reward" and conversion.raw(name) in ("score", ["score"]):
                conversion.note(name, "nothing to do: the head of a reward model is always trained")
            elif conversion.raw(name):
                conversion.ask(name, "rlkit's adapters have no dropout and no such targets")
    for name in ("dtype", "torch_dtype"):
        if conversion.has(name):
            if conversion.get("use_peft", boolean, False) and conversion.get(name, text, "") in ("bfloat16", "float32"):
                conversion.carry("model.dtype", name, text, "")
            else:
                why = "trained weights are float32, computed in fabric.precision; model.dtype is for frozen weights"
                conversion.note(name, why)
    precision = "bf16-mixed" if conversion.get("bf16", boolean, True) else "32-true"
    conversion.set("fabric.precision", precision, "bf16")


def optimizer(conversion: Conversion) -> None:
    """Set the optimizer, warm-up and schedule."""
    names = {
        "constant": "Constant", "constant_with_warmup": "Constant", "linear": "Linear", "cosine": "Cosine",
        "cosine_with_restarts": "CosineRestarts", "polynomial": "Polynomial",
        "warmup_stable_decay": "WarmupStableDecay",
    }  # fmt: skip
    conversion.carry("train.schedule", "lr_scheduler_type", choice(names), "Constant")
    if conversion.has("adam_beta1") or conversion.has("adam_beta2"):
        betas = [conversion.get("adam_beta1", number, 0.9), conversion.get("adam_beta2", number, 0.999)]
        conversion.set("train.optimizer.betas", betas, "adam_beta1", "adam_beta2")
    warmup = conversion.get("warmup_steps", number, 0.0)
    if warmup >= 1:
        _set_rollouts(conversion, "train.warmup_steps", int(warmup), "warmup_steps")
    elif warmup:  # a fraction of all steps
        conversion.set("train.warmup_ratio", warmup, "warmup_steps")
    if not conversion.get("optim", text, "adamw_torch").startswith("adamw_torch"):
        conversion.ask("optim", "train.optimizer: AdamW, AdamW8bit, Muon or TorchOptimizer")


def advantage(conversion: Conversion) -> None:
    """Set the estimator, and PPO's critic."""
    if trainer(conversion) in (*DISTILLED, *RECORDED, PAIRED):
        return
    if trainer(conversion) == "ppo":
        conversion.set("advantage", "GAE", TRAINER)
        for name in ("gamma", "lam"):
            conversion.carry(f"advantage.{name}", name, number, 1.0)
        conversion.carry("critic.lr", "learning_rate", number, 5e-5)
        conversion.carry("critic.clip", "cliprange_value", number, 0.2)
        conversion.carry_given("critic.path", "value_model_path", text, "")
        return
    if trainer(conversion) == "rloo":
        conversion.set("advantage", "RLOO", TRAINER)
        if conversion.get("normalize_advantages", boolean, False):
            conversion.ask("normalize_advantages", "advantage ReinforcePPBaseline whitens over the batch")
        bound = conversion.get("reward_clip_range", _symmetric, 0.0)
        if bound:
            conversion.set("shaping.clip", bound, "reward_clip_range")
        return
    scale = conversion.get("scale_rewards", choice(SCALES), True)
    conversion.set("advantage", "GRPO", TRAINER)
    conversion.set("advantage.eps", 1e-4)
    if scale is not True:
        conversion.set("advantage.scale_by_std", scale, "scale_rewards")
    if scale == "batch":
        conversion.note("scale_rewards", "by the deviation of R - mean in the batch, rather than that of R")
    if conversion.get("multi_objective_aggregation", text, "sum_then_normalize") == "normalize_then_sum":
        conversion.ask("multi_objective_aggregation", "advantage GDPO, with the weights of the reward's components")


def _symmetric(value: object) -> float:
    """Return the bound of a range around 0.

    Raises:
        ValueError: The value is no such range.
    """
    low, high = map(number, value) if isinstance(value, list) and len(value) == 2 else (0.0, 0.0)
    if not 0 < high == -low:
        raise ValueError("expected [-bound, bound], which shaping.clip may be")
    return high


def loss(conversion: Conversion) -> None:
    """Set the loss, its bounds and the weight of tokens."""
    if trainer(conversion) in DISTILLED:
        trl_distillation.loss(conversion)
        return
    if trainer(conversion) in (*RECORDED, PAIRED):
        trl_recorded.loss(conversion)
        return
    if trainer(conversion) == "grpo":
        _grpo_loss(conversion)
        return
    key = "cliprange" if trainer(conversion) == "ppo" else "epsilon"
    low = conversion.get(key, number, 0.2)
    conversion.set("loss", "ClipLoss", TRAINER)
    conversion.set("loss.clip_low", low, key)
    conversion.carry("loss.clip_high", "epsilon_high", number, low, key)
    if trainer(conversion) == "rloo":  # the gradient of a sequence's log-prob
        conversion.set("train.aggregation", "seq_mean_token_sum", TRAINER)


def _grpo_loss(conversion: Conversion) -> None:
    kind = conversion.get("loss_type", text, "dapo")
    if kind not in AGGREGATION:
        conversion.ask("loss_type", f"expected one of {', '.join(AGGREGATION)}")
        kind = "dapo"
    conversion.set("train.aggregation", AGGREGATION[kind], "loss_type")
    low = conversion.get("epsilon", number, 0.2)
    high = conversion.get("epsilon_high", number, low)
    level = "importance_sampling_level"
    sequence = conversion.get(level, choice({"token": False, "sequence": True}), False)
    if sequence and kind in ("cispo", "sapo", "vespo"):
        conversion.ask(level, f"the ratio of {kind} is that of each token; loss GSPO has the ratio of the sequence")
    if kind == "cispo":  # TRL bounds the ratio itself
        conversion.set("loss", "CISPO", "loss_type")
        conversion.set("loss.clip_high", round(max(high - 1, 0.0), 9), "epsilon_high", "epsilon")
    elif kind == "sapo":
        conversion.set("loss", "SAPO", "loss_type")
        for sign, ours, default in (("positive", "tau_pos", 1.0), ("pos", "tau_pos", 1.0), ("neg", "tau_neg", 1.05)):
            conversion.carry_given(f"loss.{ours}", f"sapo_temperature_{sign}", number, default)
    elif kind == "vespo":
        conversion.set("loss", "VESPO", "loss_type")
        for sign, k, decay in (("pos", 2.0, 3.0), ("neg", 3.0, 2.0)):
            conversion.carry(f"loss.k_{sign}", f"vespo_k_{sign}", number, k)
            conversion.carry(f"loss.decay_{sign}", f"vespo_lambda_{sign}", number, decay)
    else:
        conversion.set("loss", "GSPO" if sequence else "ClipLoss", level, "loss_type")
        conversion.set("loss.clip_low", low, "epsilon")
        conversion.set("loss.clip_high", high, "epsilon_high", "epsilon")
        if conversion.has("delta") and sequence:
            conversion.ask("delta", "an option of loss ClipLoss; GSPO has no second bound")
        elif conversion.get("delta", number, 0.0) > 1:
            conversion.carry("loss.clip_dual", "delta", number, 0.0)


def divergence(conversion: Conversion) -> None:
    """Set KL in the loss (GRPO) or in the reward (RLOO, PPO), and how the reference follows the policy."""
    key = "kl_coef" if trainer(conversion) == "ppo" else "beta"
    if trainer(conversion) not in ("grpo", "rloo", "ppo", "dpo", "kto") or conversion.get(key, number, 0.0) <= 0:
        return
    if trainer(conversion) == "grpo":
        conversion.carry("kl_loss.coef", key, number, 0.0)
        if conversion.get("use_bias_correction_kl", boolean, False):
            conversion.set("kl_loss.importance_weighted", True, "use_bias_correction_kl")
    elif trainer(conversion) not in RECORDED:
        conversion.carry("kl_reward.coef", key, number, 0.0)
        conversion.carry("kl_reward.estimator", "kl_estimator", text, "k1")
    if conversion.get("sync_ref_model", boolean, False):
        sync_steps = conversion.get("ref_model_sync_steps", integer, 512)
        _set_rollouts(conversion, "reference.refresh_every", sync_steps, "ref_model_sync_steps", "sync_ref_model")
        conversion.carry("reference.mix", "ref_model_mixup_alpha", number, 0.6)


def reward(conversion: Conversion) -> None:
    """Set the reward if rlkit has an equivalent; user code is named and not run."""
    if trainer(conversion) in (*DISTILLED, *RECORDED):
        conversion.set("reward", None)
        return
    names = conversion.raw("reward_funcs", [])
    functions = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if conversion.has(key) and not functions:
            conversion.set("reward", "ModelReward", key)
            conversion.carry("reward.path", key, text, "")
        elif conversion.has(key):
            conversion.ask(key, "reward Composite, of ModelReward and the reward functions")
    if functions:
        _functions(conversion, functions)
    elif "reward" not in conversion.recipe:
        conversion.ask("reward_funcs", f"not in this file: {REWARDS}")
        if conversion.has("reward_weights"):
            conversion.ask("reward_weights", "reward.weights of a Composite, by the names of its parts")


def _functions(conversion: Conversion, functions: list[str]) -> None:
    """Set one reward function, or the weighted sum of several."""
    parts = {_part_name(function, functions[:i]): _reward_of(function) for i, function in enumerate(functions)}
    weights = conversion.raw("reward_weights")
    if len(parts) == 1 and weights is None:
        [(name, options)] = parts.values()
        conversion.set("reward", name, "reward_funcs")
        for key, value in options.items():
            conversion.set(f"reward.{key}", value, "reward_funcs")
        return
    conversion.set("reward", "Composite", "reward_funcs")
    by_name = {key: {"class_path": name, "init_args": options} for key, (name, options) in parts.items()}
    conversion.set("reward.rewards", by_name, "reward_funcs")
    if isinstance(weights, list) and len(weights) == len(functions):
        conversion.set(
            "reward.weights", dict(zip(by_name, map(number_or_text, weights), strict=True)), "reward_weights"
        )
    elif weights is not None:
        conversion.ask("reward_weights", f"expected {len(functions)} weights; set reward.weights by hand")


def _part_name(function: str, others: list[str]) -> str:
    """Return a function's own name, with a number if another one has it."""
    name = re.sub(r"\W", "_", re.split(r"[:./]", function)[-1]) or "reward"
    same = sum(re.split(r"[:./]", other)[-1] == re.split(r"[:./]", function)[-1] for other in others)
    return f"{name}_{same + 1}" if same else name


def _reward_of(function: str) -> tuple[str, dict[str, object]]:
    """Return the class of a reward and its options, for a function of TRL's, a user's, or a reward model."""
    module, _, name = function.rpartition(":" if ":" in function else ".")
    if name == "accuracy_reward" and module in ("", "trl.rewards"):
        return "MathReward", {}
    if "/" in function and ":" not in function:
        return "ModelReward", {"path": function}
    return "PythonReward", {"function": f"{module or 'trl.rewards'}:{name}"}


def candidates(conversion: Conversion) -> None:
    """Set which tokens may be sampled."""
    if trainer(conversion) in DISTILLED:
        trl_distillation.truncation(conversion)
    else:
        truncation(conversion)


def engine(conversion: Conversion) -> None:
    """Set the engine and the correction of its mismatch."""
    if trainer(conversion) in RECORDED:
        trl_recorded.rollout(conversion)
        return
    if not conversion.get("use_vllm", boolean, False):
        return
    is_server = conversion.get("vllm_mode", text, "colocate") == "server"
    conversion.set("rollout.engine", "VllmServer" if is_server else "VllmEngine", "use_vllm", "vllm_mode")
    if not is_server:
        conversion.set("rollout.engine.launch.release_memory", True)
    if conversion.get("vllm_tensor_parallel_size", integer, 1) > 1:
        conversion.carry("rollout.engine.launch.tensor_parallel", "vllm_tensor_parallel_size", integer, 1)
    if trainer(conversion) == "grpo" and conversion.get("vllm_importance_sampling_correction", boolean, True):
        _correction(conversion, "vllm_importance_sampling")


def _correction(conversion: Conversion, prefix: str) -> None:
    level, _, kind = conversion.get(f"{prefix}_mode", text, "sequence_mask").partition("_")
    conversion.set("correction.level", level, f"{prefix}_mode")
    high = f"{prefix}_cap" if conversion.has(f"{prefix}_cap") else f"{prefix}_clip_max"
    conversion.carry("correction.high", high, number, 3.0)
    low = f"{prefix}_clip_min"
    if kind == "mask":
        conversion.carry("correction.low", low, number, 1e-6)
    elif conversion.has(low):
        conversion.note(low, "correction caps weights from above; a lower bound sets them to 0")


def running(conversion: Conversion) -> None:
    """Set validation, checkpoints and loggers."""
    strategy = conversion.get("eval_strategy", text, "no")
    interval = conversion.get("eval_steps", number, 0.0)
    if strategy != "no" and trainer(conversion) in RECORDED:
        trl_recorded.validation(conversion)
    if strategy == "steps" and interval >= 1:
        _set_rollouts(conversion, "validation.every", int(interval), "eval_steps", "eval_strategy")
    elif strategy == "no":
        conversion.set("validation", None, "eval_strategy")
        if conversion.recipe.pop("validation.before", None) is not None:
            conversion.note("eval_on_start", "without eval_strategy there is no validation; remove `validation: null`")
    else:
        conversion.note("eval_strategy", "validation.every counts steps")
    save_steps = conversion.get("save_steps", steps_between, None)
    if save_steps is not None:
        _set_rollouts(conversion, "save.every", save_steps, "save_steps")
    if conversion.get("save_strategy", text, "steps") != "steps":
        conversion.note("save_strategy", "save.every counts steps; the last step is always saved")
    loggers(conversion, "report_to", LOGGERS, ("project", "huggingface"), "run_name")


FUNCTIONS = (task, model, batches, optimizer, advantage, loss, divergence, reward, candidates, engine, running)
