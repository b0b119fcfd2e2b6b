"""What verl spreads over several options: each function reads some and sets a part or a section of the recipe."""

from __future__ import annotations

from rlkit.cli.convert.rows import set_steps
from rlkit.cli.convert.table import Conversion, flag, number, one_of, text, whole
from rlkit.cli.convert.verl import ACTOR, ADVANTAGES, DATA, ESTIMATORS, LOSSES, MODEL, ROLLOUT


def task(found: Conversion) -> None:
    """Set the task, and what becomes of prompts that are too long."""
    found.set("task", "Verl")
    if found.get("data.prompt_key", text, "prompt") != "prompt":
        found.note("data.prompt_key", "the task Verl reads `prompt`; HFDataset has prompt_field and answer_field")
    if not found.get("data.shuffle", flag, True):
        found.note("data.shuffle", "an order by a column: curriculum Difficulty; rlkit shuffles otherwise")
    if found.get("data.filter_overlong_prompts", flag, False):
        found.set("rollout.overlong", "drop", "data.filter_overlong_prompts")
    elif found.has(key := f"{DATA}.truncation"):
        names = {name: name for name in ("error", "left", "right", "middle")}
        found.set("rollout.overlong", found.get(key, one_of(names), "error"), key)


def steps(found: Conversion) -> None:
    """Set the number of steps, if it is known, and of mini-batches."""
    if not found.has("trainer.total_training_steps"):
        epochs = found.get("trainer.total_epochs", whole, 30)
        batch = found.get("data.train_batch_size", whole, 1024)
        set_steps(found, "trainer.total_epochs", epochs, max(batch, 1), found.given.values.get("data.train_files"))
    prompts, key = found.get("data.train_batch_size", whole, 1024), f"{ACTOR}.ppo_mini_batch_size"
    size = max(found.get(key, whole, 256), 1)
    count = max(round(prompts / size), 1)
    found.set("train.minibatches", count, key, "data.train_batch_size")
    if size * count != prompts:
        found.note(key, f"{prompts} prompts are no multiple of {size}; train.minibatches is {count}")


def optimizer(found: Conversion) -> None:
    """Set warm-up and schedule of the policy."""
    _schedule(found, f"{ACTOR}.optim", "train")
    key, limit = f"{ACTOR}.use_dynamic_bsz", f"{ACTOR}.ppo_max_token_len_per_gpu"
    if found.get(key, flag, False):
        if found.has(limit):
            found.set("train.max_tokens_per_micro_batch", found.get(limit, whole, 16384), limit)
        found.note(key, "nothing to do: micro-batches are always filled by tokens")
    offload = (f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload")
    if any(found.get(name, flag, False) for name in offload):
        found.set("train.offload_during_rollout", True, *offload)


def _schedule(found: Conversion, prefix: str, section: str) -> None:
    ratio, count = f"{prefix}.lr_warmup_steps_ratio", f"{prefix}.lr_warmup_steps"
    if (warm := found.get(count, whole, -1)) >= 0:
        found.set(f"{section}.warmup_steps", warm, count)
    elif share := found.get(ratio, number, 0.0):
        found.set(f"{section}.warmup_ratio", share, ratio)
    names = {"constant": "Constant", "cosine": "Cosine"}
    for key in (f"{prefix}.lr_scheduler_type", f"{prefix}.warmup_style"):
        if found.has(key):
            found.set(f"{section}.schedule", name := found.get(key, one_of(names), "Constant"), key)
            floor = f"{prefix}.min_lr_ratio"
            if name == "Cosine" and found.has(floor):
                found.set(f"{section}.schedule.min_lr_ratio", found.get(floor, number, 0.0), floor)


def advantage(found: Conversion) -> None:
    """Set the estimator and its options."""
    key = "algorithm.adv_estimator"
    name = found.get(key, one_of(ADVANTAGES), "")
    if not name:
        return
    found.set("advantage", name, key)
    if name in ("GRPO", "PassK") and found.has(std := "algorithm.norm_adv_by_std_in_grpo"):
        found.set("advantage.scale_by_std", found.get(std, flag, True), std)
    if name in ("GAE", "ReinforcePP", "ReMax") and found.has("algorithm.gamma"):
        found.set("advantage.gamma", found.get("algorithm.gamma", number, 1.0), "algorithm.gamma")
    if name == "GAE" and found.has("algorithm.lam"):
        found.set("advantage.lam", found.get("algorithm.lam", number, 1.0), "algorithm.lam")
    if name == "GAE":
        critic(found)


def critic(found: Conversion) -> None:
    """Set the critic; verl updates the policy from the step `critic_warmup` on, the first being 1."""
    found.set("critic.lr", found.get("critic.optim.lr", number, 1e-5), "critic.optim.lr")
    for key, ours in (("grad_clip", "max_grad_norm"), ("cliprange_value", "clip")):
        if found.has(f"critic.{key}"):
            found.set(f"critic.{ours}", found.get(f"critic.{key}", number, 1.0), f"critic.{key}")
    decay = "critic.optim.weight_decay"
    found.set("critic.weight_decay", found.get(decay, number, 0.01), decay)
    path = found.get("critic.model.path", text, "")
    if path and path != found.given.values.get(f"{MODEL}.path"):
        found.set("critic.path", path, "critic.model.path")
    elif path:
        found.note("critic.model.path", "nothing to do: the critic's backbone is the policy's model by default")
    _schedule(found, "critic.optim", "critic")
    _adapters(found, "critic.model", "critic")
    if (delay := found.get("trainer.critic_warmup", whole, 0)) > 1:
        found.set("critic.policy_delay_steps", delay - 1, "trainer.critic_warmup")


def loss(found: Conversion) -> None:
    """Set the loss with its bounds."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    name = found.get(key, one_of(LOSSES), "ClipLoss")
    found.set("loss", name, key)
    single, low, high = (f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))
    if name in ("ClipLoss", "GSPO", "CISPO", "GMPO", "DPPO", "ClipCov"):
        middle = found.get(single, number, 0.2)
        found.set("loss.clip_low", found.get(low, number, middle), low if found.has(low) else single)
        found.set("loss.clip_high", found.get(high, number, middle), high if found.has(high) else single)
        if found.has(single) and not (found.has(low) or found.has(high)):
            found.note(single, "it sets both bounds here; in verl their own defaults hide it")
    if name == "ClipLoss":
        found.set("loss.clip_dual", found.get(f"{ACTOR}.clip_ratio_c", number, 3.0), f"{ACTOR}.clip_ratio_c")
    if name == "DPPO":
        found.set("loss.kind", "kl" if found.get(key, text, "") == "dppo_kl" else "tv", key)
    if name == "SAPO":
        for end in ("tau_pos", "tau_neg"):
            if found.has(f"{ACTOR}.{end}"):
                found.set(f"loss.{end}", found.get(f"{ACTOR}.{end}", number, 1.0), f"{ACTOR}.{end}")
    if name in ("GSPO", "SAPO", "GMPO"):  # whatever verl's option is
        found.set("train.aggregation", "seq_mean_token_mean", key)
    options: dict[str, tuple[tuple[str, str], ...]] = {
        "ClipCov": (("clip_cov_ratio", "fraction"), ("clip_cov_lb", "cov_low"), ("clip_cov_ub", "cov_high")),
    }
    options["KLCov"] = (("kl_cov_ratio", "fraction"), ("ppo_kl_coef", "coef"))
    for theirs, ours in options.get(name, ()):
        if found.has(full := f"{ACTOR}.policy_loss.{theirs}"):
            found.set(f"loss.{ours}", found.get(full, number, 1.0), full)


def divergence(found: Conversion) -> None:
    """Set KL in the loss, and in the reward."""
    use, coef, kind = f"{ACTOR}.use_kl_loss", f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"
    if found.get(use, flag, False):
        found.set("kl_loss.coef", found.get(coef, number, 0.001), coef, use)
        found.set("kl_loss.estimator", found.get(kind, ESTIMATORS, "k3"), kind)
    use, kind, control = "algorithm.use_kl_in_reward", "algorithm.kl_penalty", "algorithm.kl_ctrl"
    if not found.get(use, flag, False):
        return
    found.set("kl_reward.coef", found.get(f"{control}.kl_coef", number, 0.001), f"{control}.kl_coef", use)
    found.set("kl_reward.estimator", found.get(kind, ESTIMATORS, "k1"), kind)
    if found.get(f"{control}.type", text, "fixed") == "adaptive":
        found.set("kl_reward.target", found.get(f"{control}.target_kl", number, 0.1), f"{control}.target_kl")
        found.set("kl_reward.horizon", found.get(f"{control}.horizon", whole, 10000), f"{control}.horizon")


def correction(found: Conversion) -> None:
    """Set the importance weights between engine and trainer, which verl caps from above."""
    cap = f"{ACTOR}.tis_imp_ratio_cap"
    level, threshold = (f"algorithm.rollout_correction.rollout_is{end}" for end in ("", "_threshold"))
    if found.get(cap, number, -1.0) > 0:
        found.set("correction.high", found.get(cap, number, 2.0), cap)
    if found.has(level):
        found.set("correction.level", found.get(level, one_of({n: n for n in ("token", "sequence")}), "token"), level)
        found.set("correction.high", found.get(threshold, number, 2.0), threshold)


def reward(found: Conversion) -> None:
    """Set the reward: a classifier is a part, code of yours is named and not run."""
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    if found.has(path):
        why = "verl calls f(data_source, solution_str, ground_truth, extra_info), PythonReward f(text, answer, meta)"
        found.note(path, f"{why}: write that, then `reward: {{class_path: PythonReward, init_args: ...}}`")
        found.note(name, "the part behind the colon of PythonReward's function")
        return
    if found.get("reward_model.enable", flag, False):
        found.set("reward", "ModelReward", "reward_model.enable")
        found.set("reward.path", found.get("reward_model.model.path", text, ""), "reward_model.model.path")
    else:
        found.recipe["reward"] = ("MathReward", "verl chooses by data_source; this one is for GSM8K, MATH and the like")
        _overlong(found)
    for key in filter(lambda name: not found.carries(name), found.given.values):
        if key.endswith("reward_manager"):
            found.note(key, "nothing to do: rewards run in worker processes with a deadline each")
        elif "overlong_buffer" in key or key.endswith("max_resp_len"):
            found.note(key, "options of Overlong, in a Composite with the reward; recipe dapo_gsm8k has one")
        elif key.startswith("reward_model."):
            found.note(key, "see rlkit plugins show ModelReward for its options")


def _overlong(found: Conversion) -> None:
    """Add the penalty of DAPO's reward manager, under any of the names that verl has had for it."""
    enabled = next((key for key in found.given.values if key.endswith(".enable") and "overlong_buffer" in key), None)
    if enabled is None or not found.get(enabled, flag, False):
        return
    prefix = enabled.removesuffix("enable")
    budget, factor = (
        found.get("data.max_response_length", whole, 512),
        found.get(f"{prefix}penalty_factor", number, 1.0),
    )
    buffer = found.get(f"{prefix}len", whole, 0)
    if not 0 < buffer <= budget or factor < 0:
        return
    options = {"max_tokens": budget, "buffer": buffer, "factor": factor}
    parts = {"math": "MathReward", "length": {"class_path": "Overlong", "init_args": options}}
    del found.recipe["reward"]
    found.set("reward", "Composite", enabled)
    found.set("reward.rewards", parts, f"{prefix}len", f"{prefix}penalty_factor", enabled)


def engine(found: Conversion) -> None:
    """Set the engine, and where the run takes place."""
    key, parallel, release = (f"{ROLLOUT}.{end}" for end in ("name", "tensor_model_parallel_size", "free_cache_engine"))
    name = found.get(key, text, "")
    if name.startswith(("vllm", "sglang")):
        found.set("rollout.engine", "SGLangEngine", key)
        found.set("rollout.engine.launch.release_memory", found.get(release, flag, True), release)
        if (count := found.get(parallel, whole, 1)) > 1:
            found.set("rollout.engine.launch.tensor_parallel", count, parallel)
    if name.startswith("vllm"):
        found.note(key, "rlkit has no vLLM: SGLangEngine takes its place (pip install 'rlkit-fabric[sglang]')")
    found.set("fabric.precision", "bf16-mixed")
    strategy = f"{ACTOR}.strategy"
    if found.get("trainer.n_gpus_per_node", whole, 8) * found.get("trainer.nnodes", whole, 1) > 1:
        found.set("fabric.strategy", "fsdp2", strategy)
    if found.get(strategy, text, "fsdp") not in ("fsdp", "fsdp2"):
        found.note(strategy, "rlkit shards with FSDP2: fabric.strategy")


def validation(found: Conversion) -> None:
    """Set how validation samples, the conversation's turns and the filter of groups."""
    prefix = f"{ROLLOUT}.val_kwargs"
    samples = found.get(f"{prefix}.n", whole, 1) if found.get(f"{prefix}.do_sample", flag, False) else 0
    found.set("validation.samples", samples, f"{prefix}.n", f"{prefix}.do_sample")
    for name in ("temperature", "top_p", "top_k"):
        if samples and found.has(key := f"{prefix}.{name}"):
            value = max(found.get(key, number, 0.0), 0.0)
            found.set(f"validation.sampling.{name}", int(value) if name == "top_k" else value, key)
    if samples and any(key.startswith("validation.sampling.") for key in found.recipe):
        budget = "data.max_response_length"
        found.set("validation.sampling.max_tokens", found.get(budget, whole, 512), budget)
    turns = f"{ROLLOUT}.multi_turn.max_assistant_turns"
    if found.has(turns):
        found.note(turns, f"conversation.turns: {found.given.values[turns]}, beside the tools")
    groups = "algorithm.filter_groups"
    if found.get(f"{groups}.enable", flag, False):
        found.set("rollout.filter", "ZeroSignal", f"{groups}.enable")
        tries = found.get(f"{groups}.max_num_gen_batches", whole, 10)
        found.set("rollout.filter.max_refills", max(tries - 1, 0), f"{groups}.max_num_gen_batches")
        if found.get(f"{groups}.metric", text, "acc") == "acc":
            found.set("rollout.filter.component", "accuracy", f"{groups}.metric")


def model(found: Conversion) -> None:
    """Set what the chat template reads, and adapters, where there are any."""
    template = "data.apply_chat_template_kwargs."
    for key in filter(lambda name: name.startswith(template), found.given.values):
        found.set(f"model.chat_template_kwargs.{key.removeprefix(template)}", found.given.values[key], key)
    _adapters(found, MODEL, "model")


def _adapters(found: Conversion, prefix: str, section: str) -> None:
    rank, alpha, targets = (f"{prefix}.{end}" for end in ("lora_rank", "lora_alpha", "target_modules"))
    if (size := found.get(rank, whole, 0)) > 0:
        found.set(f"{section}.lora.rank", size, rank)
        found.set(f"{section}.lora.alpha", found.get(alpha, number, 16.0), alpha)
        if found.has(targets):
            found.set(f"{section}.lora.targets", found.given.values[targets], targets)


def loggers(found: Conversion) -> None:
    """Set the loggers; metrics.jsonl and the terminal are always written."""
    key, project, name = "trainer.logger", "trainer.project_name", "trainer.experiment_name"
    given = found.given.values.get(key, [])
    listed = []
    for one in given if isinstance(given, list) else [given]:
        if one == "wandb":
            options = {"project": found.get(project, text, "verl_examples"), "name": found.get(name, text, "") or None}
            listed.append({"class_path": "Wandb", "init_args": options})
        elif one == "mlflow":
            options = {
                "experiment": found.get(project, text, "verl_examples"),
                "name": found.get(name, text, "") or None,
            }
            listed.append({"class_path": "MLflow", "init_args": options})
        elif one == "tensorboard":
            listed.append({"class_path": "TensorBoard", "init_args": {}})
        elif one != "console":
            found.note(key, f"{one!r} is none of rlkit's: Wandb, TensorBoard, MLflow, CSV, or a plugin's")
    if listed:
        found.set("log.loggers", listed, key, project, name)


FUNCTIONS = (
    task, model, steps, optimizer, advantage, loss, divergence, correction, reward, engine, validation, loggers,
)  # fmt: skip
