"""What TRL spreads over several options: each function reads some and sets a part or a section of the recipe."""

from __future__ import annotations

from rlkit.cli.convert.rows import set_steps
from rlkit.cli.convert.table import Conversion, flag, number, one_of, text, whole
from rlkit.cli.convert.trl import TRAINER

AGGREGATION = {
    "grpo": "seq_mean_token_mean", "dapo": "token_mean", "bnpo": "token_mean", "cispo": "token_mean",
    "dr_grpo": "seq_mean_token_sum_norm", "sapo": "seq_mean_token_mean",
}  # fmt: skip
REWARDS = "write f(text, answer) or TRL's own form in a file, then reward PythonReward with function: file.py:name"


def trainer(found: Conversion) -> str:
    """Return which trainer the options are of."""
    return str(found.given.values[TRAINER])


def task(found: Conversion) -> None:
    """Set the task."""
    found.set("task", "TRL")


def batches(found: Conversion) -> None:
    """Set prompts, samples, mini-batches and epochs of a step; TRL counts completions, and optimizer steps."""
    names = ("per_device_train_batch_size", "num_processes", "gradient_accumulation_steps")
    device, processes, accumulated = (max(found.get(name, whole, 1), 1) for name in names)
    if trainer(found) == "ppo":
        minibatches = max(found.get("num_mini_batches", whole, 1), 1)
        rows, group, updates = device * processes * accumulated * minibatches, 1, minibatches
        found.set("train.epochs", found.get("num_ppo_epochs", whole, 4), "num_ppo_epochs")
        found.set("rollout.group_size", 1)
    else:
        per_update = device * processes * accumulated
        per_generation = max(found.get("steps_per_generation", whole, accumulated), 1)
        rows = found.get("generation_batch_size", whole, device * processes * per_generation)
        key = "rloo_k" if found.has("rloo_k") else "num_generations"
        group = max(found.get(key, whole, 8), 1)
        updates = max(round(rows / per_update), 1)
        found.set("rollout.group_size", group, key)
        found.set("train.epochs", found.get("num_iterations", whole, 1), "num_iterations")
    prompts = max(rows // group, 1)
    sources = (*names, "steps_per_generation", "generation_batch_size", "num_mini_batches")
    found.set("train.prompts_per_step", prompts, *sources)
    found.set("train.minibatches", min(updates, prompts), *sources)
    if prompts * group != rows:
        found.note("num_generations", f"{rows} completions are no multiple of {group}; prompts_per_step is {prompts}")
    if trainer(found) == "rloo" and updates * found.get("num_iterations", whole, 1) > 1:
        why = "TRL's RLOO clips the ratio of whole answers, ClipLoss that of tokens: equal in a rollout's first update"
        found.note("epsilon", f"{why}; with several of them loss GSPO is nearest, or train.minibatches and epochs: 1")
    if updates > prompts:
        found.note(
            "gradient_accumulation_steps", f"{updates} updates of {prompts} prompts: rlkit divides no group of samples"
        )
    if processes > 1:
        found.set("fabric.devices", processes, "num_processes")
    _steps(found, rows, updates)


def _steps(found: Conversion, rows: int, updates: int) -> None:
    """Set the number of rollout steps, if it is known."""
    epochs = int(found.recipe["train.epochs"][0])  # type: ignore[call-overload]
    limit, episodes = found.get("max_steps", whole, -1), found.get("total_episodes", whole, 0)
    if limit > 0:
        found.set("train.steps", max(-(-limit // (updates * epochs)), 1), "max_steps")
    elif episodes > 0:
        found.set("train.steps", max(-(-episodes // rows), 1), "total_episodes")
    else:
        prompts = int(found.recipe["train.prompts_per_step"][0])  # type: ignore[call-overload]
        count = found.get("num_train_epochs", number, 3.0)
        set_steps(found, "num_train_epochs", count, prompts, found.given.values.get("dataset_name"))


def model(found: Conversion) -> None:
    """Set adapters, the type of frozen weights and the precision."""
    if found.get("use_peft", flag, False):
        found.set("model.lora.rank", found.get("lora_r", whole, 16), "lora_r", "use_peft")
        found.set("model.lora.alpha", found.get("lora_alpha", number, 32.0), "lora_alpha")
        if found.has("lora_target_modules"):
            targets = found.given.values["lora_target_modules"]
            listed = [str(one).strip(", ") for one in targets] if isinstance(targets, list) else targets
            found.set("model.lora.targets", listed, "lora_target_modules")
        for name in ("lora_dropout", "lora_modules_to_save", "lora_target_parameters", "lora_task_type"):
            if found.has(name):
                found.note(name, "rlkit's adapters have rank, alpha and targets, and no dropout")
    for name in ("dtype", "torch_dtype"):
        if found.has(name):
            if found.get("use_peft", flag, False) and found.get(name, text, "") in ("bfloat16", "float32"):
                found.set("model.dtype", found.get(name, text, ""), name)
            else:
                found.note(
                    name, "trained weights are float32, computed in fabric.precision; model.dtype is of frozen ones"
                )
    precision = "bf16-mixed" if found.get("bf16", flag, True) else "32-true"
    found.set("fabric.precision", precision, "bf16")


def optimizer(found: Conversion) -> None:
    """Set the optimizer, warm-up and schedule."""
    names = {"constant": "Constant", "constant_with_warmup": "Constant", "linear": "Linear", "cosine": "Cosine"}
    found.set("train.schedule", found.get("lr_scheduler_type", one_of(names), "Constant"), "lr_scheduler_type")
    if found.has("adam_beta1") or found.has("adam_beta2"):
        betas = [found.get("adam_beta1", number, 0.9), found.get("adam_beta2", number, 0.999)]
        found.set("train.optimizer.betas", betas, "adam_beta1", "adam_beta2")
    if (warm := found.get("warmup_steps", number, 0.0)) >= 1:
        found.set("train.warmup_steps", int(warm), "warmup_steps")
    elif warm:  # a share
        found.set("train.warmup_ratio", warm, "warmup_steps")
    if not found.get("optim", text, "adamw_torch").startswith("adamw_torch"):
        found.note("optim", "train.optimizer: AdamW, Muon or TorchOptimizer")


def advantage(found: Conversion) -> None:
    """Set the estimator, and the critic of PPO."""
    if trainer(found) == "ppo":
        found.set("advantage", "GAE", TRAINER)
        for name in ("gamma", "lam"):
            found.set(f"advantage.{name}", found.get(name, number, 1.0), name)
        found.set("critic.lr", found.get("learning_rate", number, 5e-5), "learning_rate")
        found.set("critic.clip", found.get("cliprange_value", number, 0.2), "cliprange_value")
        if found.has("value_model_path"):
            found.set("critic.path", found.get("value_model_path", text, ""), "value_model_path")
        return
    if trainer(found) == "rloo":
        found.set("advantage", "RLOO", TRAINER)
        if found.get("normalize_advantages", flag, False):
            found.note("normalize_advantages", "advantage ReinforcePPBaseline whitens over the batch")
        if found.has("reward_clip_range"):
            found.note("reward_clip_range", "shaping.clip, the same on both sides of 0")
        return
    scale = found.get("scale_rewards", text, "group").lower()
    found.set("advantage", "GRPO", TRAINER)
    found.set("advantage.eps", 1e-4)
    if scale in ("none", "false"):
        found.set("advantage.scale_by_std", False, "scale_rewards")
    elif scale == "batch":
        found.note("scale_rewards", "nearest: advantage.scale_by_std batch, by the deviation of R - mean and not of R")
    if found.get("multi_objective_aggregation", text, "sum_then_normalize") == "normalize_then_sum":
        found.note("multi_objective_aggregation", "advantage GDPO, with the weights of the reward's components")


def loss(found: Conversion) -> None:
    """Set the loss with its bounds, and how tokens are weighted."""
    if trainer(found) != "grpo":
        key = "cliprange" if trainer(found) == "ppo" else "epsilon"
        low = found.get(key, number, 0.2)
        found.set("loss", "ClipLoss", TRAINER)
        found.set("loss.clip_low", low, key)
        found.set("loss.clip_high", found.get("epsilon_high", number, low), "epsilon_high", key)
        if trainer(found) == "rloo":  # the gradient of a sequence's log-prob
            found.set("train.aggregation", "seq_mean_token_sum", TRAINER)
        return
    kind = found.get("loss_type", text, "dapo")
    if kind not in AGGREGATION:
        found.note("loss_type", f"expected one of {', '.join(AGGREGATION)}")
        kind = "dapo"
    found.set("train.aggregation", AGGREGATION[kind], "loss_type")
    low = found.get("epsilon", number, 0.2)
    high = found.get("epsilon_high", number, low)
    if kind == "cispo":  # TRL's bound is of the ratio itself
        found.set("loss", "CISPO", "loss_type")
        found.set("loss.clip_high", round(max(high - 1, 0.0), 9), "epsilon_high", "epsilon")
    elif kind == "sapo":
        found.set("loss", "SAPO", "loss_type")
        for end, ours, usual in (("positive", "tau_pos", 1.0), ("pos", "tau_pos", 1.0), ("neg", "tau_neg", 1.05)):
            if found.has(name := f"sapo_temperature_{end}"):
                found.set(f"loss.{ours}", found.get(name, number, usual), name)
    else:
        sequence = found.get("importance_sampling_level", text, "token") == "sequence"
        found.set("loss", "GSPO" if sequence else "ClipLoss", "importance_sampling_level", "loss_type")
        found.set("loss.clip_low", low, "epsilon")
        found.set("loss.clip_high", high, "epsilon_high", "epsilon")
        if (bound := found.get("delta", number, 0.0)) > 1 and not sequence:
            found.set("loss.clip_dual", bound, "delta")


def divergence(found: Conversion) -> None:
    """Set KL in the loss, or in the reward as RLOO and PPO do, and the reference that follows the policy."""
    key = "kl_coef" if trainer(found) == "ppo" else "beta"
    if (coef := found.get(key, number, 0.0)) <= 0:
        return
    if trainer(found) == "grpo":
        found.set("kl_loss.coef", coef, key)
        if found.get("use_bias_correction_kl", flag, False):
            found.set("kl_loss.importance_weighted", True, "use_bias_correction_kl")
    else:
        found.set("kl_reward.coef", coef, key)
        found.set("kl_reward.estimator", found.get("kl_estimator", text, "k1"), "kl_estimator")
    if found.get("sync_ref_model", flag, False):
        every, mix = "ref_model_sync_steps", "ref_model_mixup_alpha"
        found.set("reference.refresh_every", found.get(every, whole, 512), every, "sync_ref_model")
        found.set("reference.mix", round(1 - found.get(mix, number, 0.6), 9), mix)  # TRL's weight is the reference's


def reward(found: Conversion) -> None:
    """Set the reward where a part stands for it; code of yours is named, and not run."""
    names = found.given.values.get("reward_funcs", [])
    listed = [str(name) for name in names] if isinstance(names, list) else [str(names)]
    for key in ("reward_model_name_or_path", "reward_model_path"):
        if found.has(key) and not listed:
            found.set("reward", "ModelReward", key)
            found.set("reward.path", found.get(key, text, ""), key)
        elif found.has(key):
            found.note(key, "reward Composite of ModelReward and the others")
    if listed == ["accuracy_reward"]:
        found.set("reward", "MathReward", "reward_funcs")
    elif listed:
        found.note("reward_funcs", f"{REWARDS}; several are a Composite, accuracy_reward is MathReward")
    elif "reward" not in found.recipe:
        found.note("reward_funcs", f"not in this file: {REWARDS}")
    if found.has("reward_weights"):
        found.note("reward_weights", "weights of Composite")


def engine(found: Conversion) -> None:
    """Set the engine, and the correction for its mismatch."""
    if not found.get("use_vllm", flag, False):
        return
    found.set("rollout.engine", "SGLangEngine", "use_vllm")
    found.note("use_vllm", "rlkit has no vLLM: SGLangEngine takes its place (pip install 'rlkit-fabric[sglang]')")
    found.set("rollout.engine.launch.release_memory", True)
    if found.get("vllm_mode", text, "colocate") == "server":
        found.note("vllm_mode", "rollout.engine: SGLangServer, with first_gpu or urls")
    if (count := found.get("vllm_tensor_parallel_size", whole, 1)) > 1:
        found.set("rollout.engine.launch.tensor_parallel", count, "vllm_tensor_parallel_size")
    use, mode, cap = (f"vllm_importance_sampling_{end}" for end in ("correction", "mode", "clip_max"))
    if not found.get(use, flag, True):
        return
    level, _, kind = found.get(mode, text, "sequence_mask").partition("_")
    cap = "vllm_importance_sampling_cap" if found.has("vllm_importance_sampling_cap") else cap
    found.set("correction.level", level, mode)
    found.set("correction.high", found.get(cap, number, 3.0), cap)
    low = "vllm_importance_sampling_clip_min"
    if kind == "mask":
        found.set("correction.low", found.get(low, number, 1e-6), low)
    elif found.has(low):
        found.note(low, "correction caps weights from above; a low bound sets them to 0")


def running(found: Conversion) -> None:
    """Set validation, checkpoints and loggers."""
    strategy, every = found.get("eval_strategy", text, "no"), found.get("eval_steps", number, 0.0)
    if strategy == "steps" and every >= 1:
        found.set("validation.every", int(every), "eval_steps", "eval_strategy")
    elif strategy == "no":
        found.set("validation", None, "eval_strategy")
        if found.recipe.pop("validation.before", None) is not None:
            found.note("eval_on_start", "without eval_strategy nothing is validated; remove `validation: null`")
    else:
        found.note("eval_strategy", "validation.every counts steps")
    if found.get("save_strategy", text, "steps") != "steps":
        found.note("save_strategy", "save.every counts steps; the last one is always saved")
    targets = found.given.values.get("report_to", [])
    listed = []
    for one in targets if isinstance(targets, list) else [targets]:
        name = found.get("run_name", text, "") or None
        if one == "wandb":
            options = {"project": found.get("project", text, "huggingface"), "name": name}
            listed.append({"class_path": "Wandb", "init_args": options})
        elif one in ("tensorboard", "mlflow"):
            listed.append({"class_path": {"tensorboard": "TensorBoard", "mlflow": "MLflow"}[str(one)], "init_args": {}})
        elif one != "none":
            found.note("report_to", f"{one!r} is none of rlkit's: Wandb, TensorBoard, MLflow, CSV, or a plugin's")
    if listed:
        found.set("log.loggers", listed, "report_to", "run_name", "project")


FUNCTIONS = (task, model, batches, optimizer, advantage, loss, divergence, reward, engine, running)
