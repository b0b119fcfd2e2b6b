"""verl's options that are read together: each function sets a part or a section of the recipe."""

from __future__ import annotations

from functools import partial

from rlkit_convert.conversion import Conversion
from rlkit_convert.parts import PROJECT_LOGGERS, loggers, set_steps, truncation
from rlkit_convert.values import boolean, choice, integer, number, text
from rlkit_convert.verl import ADVANTAGES, ESTIMATORS, LOSSES
from rlkit_convert.verl_correction import correction
from rlkit_convert.verl_reward import reward
from rlkit_convert.verl_runtime import ACTOR, MODEL, ROLLOUT
from rlkit_convert.verl_tools import tools

LOSS_OPTIONS = {
    "ClipCov": {"clip_cov_ratio": "fraction", "clip_cov_lb": "cov_low", "clip_cov_ub": "cov_high"},
    "KLCov": {"kl_cov_ratio": "fraction", "ppo_kl_coef": "coef"},
}
"""verl's options of a loss and rlkit's names for them."""
MEGATRON_LAYERS = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]
"""All linear layers, in Megatron's names."""
LOGGERS = {**PROJECT_LOGGERS, "mlflow": ("MLflow", "experiment"), "console": ("", "")}
ENGINES = {"vllm": "VllmEngine", "sglang": "SGLangEngine"}


def task(conversion: Conversion) -> None:
    """Set the task and the treatment of prompts that are too long."""
    conversion.set("task", "Verl")
    max_rows = conversion.get("data.train_max_samples", integer, -1)
    if max_rows > 0:
        conversion.set("train.max_rows", max_rows, "data.train_max_samples")
        conversion.note("data.train_max_samples", "train.max_rows takes the first rows, verl random ones")
    generated, trained = conversion.get("data.gen_batch_size", integer, 0), "data.train_batch_size"
    if generated > conversion.get(trained, integer, 1024):
        conversion.ask("data.gen_batch_size", "rollout.oversample starts more prompts than a step trains on")
    if conversion.get("data.filter_overlong_prompts", boolean, False):
        conversion.set("rollout.overlong", "drop", "data.filter_overlong_prompts")
    elif conversion.has("data.truncation"):
        names = {name: name for name in ("error", "left", "right", "middle")}
        conversion.carry("rollout.overlong", "data.truncation", choice(names), "error")


def steps(conversion: Conversion) -> None:
    """Set the number of mini-batches, and of steps if it is known."""
    if conversion.is_unknown("trainer.total_epochs", "trainer.total_training_steps", "data.train_batch_size"):
        conversion.leave_out("train.steps")
    elif not conversion.has("trainer.total_training_steps"):
        epochs = conversion.get("trainer.total_epochs", integer, 30)
        batch = max(conversion.get("data.train_batch_size", integer, 1024), 1)
        set_steps(conversion, "trainer.total_epochs", epochs, batch, conversion.raw("data.train_files"))
    prompts = conversion.get("data.train_batch_size", integer, 1024)
    key = f"{ACTOR}.ppo_mini_batch_size"
    size = max(conversion.get(key, integer, 256), 1)
    count = max(round(prompts / size), 1)
    conversion.set("train.minibatches", count, key, "data.train_batch_size")
    if size * count != prompts:
        conversion.note(key, f"{prompts} prompts are not a multiple of {size}; train.minibatches is {count}")


def optimizer(conversion: Conversion) -> None:
    """Set the policy's warm-up, schedule and micro-batches."""
    _schedule(conversion, f"{ACTOR}.optim", "train")
    key = f"{ACTOR}.use_dynamic_bsz"
    limit = f"{ACTOR}.ppo_max_token_len_per_gpu"
    if conversion.get(key, boolean, False):
        conversion.carry_given("train.max_tokens_per_micro_batch", limit, integer, 16384)
        conversion.note(key, "nothing to do: micro-batches are always filled by tokens")
    offload = (f"{ACTOR}.fsdp_config.param_offload", f"{ACTOR}.fsdp_config.optimizer_offload")
    if any(conversion.get(name, boolean, False) for name in offload):
        conversion.set("train.offload_during_rollout", True, *offload)


def _schedule(conversion: Conversion, prefix: str, section: str) -> None:
    steps_key = f"{prefix}.lr_warmup_steps"
    ratio_key = f"{prefix}.lr_warmup_steps_ratio"
    warmup_steps = conversion.get(steps_key, integer, -1)
    if warmup_steps >= 0:
        conversion.set(f"{section}.warmup_steps", warmup_steps, steps_key)
    elif conversion.get(ratio_key, number, 0.0):
        conversion.carry(f"{section}.warmup_ratio", ratio_key, number, 0.0)
    names = {"constant": "Constant", "cosine": "Cosine", "linear": "Linear"}
    for key in (f"{prefix}.lr_scheduler_type", f"{prefix}.warmup_style", f"{prefix}.lr_decay_style"):
        if conversion.has(key):
            schedule = conversion.get(key, choice(names), "Constant")
            conversion.set(f"{section}.schedule", schedule, key)
            for option, default in (("min_lr_ratio", 0.0), ("num_cycles", 0.5)):
                if schedule == "Cosine" and conversion.has(f"{prefix}.{option}"):
                    conversion.carry(f"{section}.schedule.{option}", f"{prefix}.{option}", number, default)


def advantage(conversion: Conversion) -> None:
    """Set the estimator and its options."""
    key = "algorithm.adv_estimator"
    name = conversion.get(key, choice(ADVANTAGES), "")
    if not name:
        return
    conversion.set("advantage", name, key)
    if name in ("GRPO", "PassK") and conversion.has("algorithm.norm_adv_by_std_in_grpo"):
        conversion.carry("advantage.scale_by_std", "algorithm.norm_adv_by_std_in_grpo", boolean, True)
    if name in ("GAE", "ReinforcePP", "ReMax") and conversion.has("algorithm.gamma"):
        conversion.carry("advantage.gamma", "algorithm.gamma", number, 1.0)
    if name == "GAE" and conversion.has("algorithm.lam"):
        conversion.carry("advantage.lam", "algorithm.lam", number, 1.0)
    if name == "GAE":
        critic(conversion)


def critic(conversion: Conversion) -> None:
    """Set the critic; verl updates the policy from step `critic_warmup` on, counting from 1."""
    conversion.carry("critic.lr", "critic.optim.lr", number, 1e-5)
    for key, ours in (("grad_clip", "max_grad_norm"), ("cliprange_value", "clip")):
        conversion.carry_given(f"critic.{ours}", f"critic.{key}", number, 1.0)
    conversion.carry("critic.weight_decay", "critic.optim.weight_decay", number, 0.01)
    path = conversion.get("critic.model.path", text, "")
    if path and path != conversion.raw(f"{MODEL}.path"):
        conversion.set("critic.path", path, "critic.model.path")
    elif path:
        conversion.note("critic.model.path", "nothing to do: the critic's backbone is the policy's model by default")
    if conversion.has("critic.optim.betas"):
        conversion.set("critic.optimizer.betas", conversion.raw("critic.optim.betas"), "critic.optim.betas")
    if conversion.get("critic.ppo_epochs", integer, 0) not in (0, conversion.get(f"{ACTOR}.ppo_epochs", integer, 1)):
        conversion.ask("critic.ppo_epochs", "the critic trains on the policy's mini-batches: train.epochs")
    _schedule(conversion, "critic.optim", "critic")
    _adapters(conversion, "critic.model", "critic")
    first_update = conversion.get("trainer.critic_warmup", integer, 0)
    if first_update > 1:
        conversion.set("critic.policy_delay_steps", first_update - 1, "trainer.critic_warmup")


def loss(conversion: Conversion) -> None:
    """Set the loss and its bounds."""
    key = f"{ACTOR}.policy_loss.loss_mode"
    name = conversion.get(key, choice(LOSSES), "ClipLoss")
    conversion.set("loss", name, key)
    single, low, high = (f"{ACTOR}.clip_ratio{end}" for end in ("", "_low", "_high"))
    if name in ("ClipLoss", "GSPO", "CISPO", "GMPO", "DPPO", "ClipCov"):
        bound = conversion.get(single, number, 0.2)
        conversion.set("loss.clip_low", conversion.get(low, number, bound), low if conversion.has(low) else single)
        conversion.set("loss.clip_high", conversion.get(high, number, bound), high if conversion.has(high) else single)
        if conversion.has(single) and not (conversion.has(low) or conversion.has(high)):
            conversion.note(single, "it sets both bounds here; in verl the defaults of both bounds override it")
    if name == "ClipLoss":
        conversion.carry("loss.clip_dual", f"{ACTOR}.clip_ratio_c", number, 3.0)
    if name == "DPPO":
        conversion.set("loss.kind", "kl" if conversion.get(key, text, "") == "dppo_kl" else "tv", key)
    if name == "SAPO":
        for end in ("tau_pos", "tau_neg"):
            conversion.carry_given(f"loss.{end}", f"{ACTOR}.{end}", number, 1.0)
    if name in ("GSPO", "SAPO", "GMPO"):  # whatever loss_agg_mode is
        conversion.set("train.aggregation", "seq_mean_token_mean", key)
    for theirs, ours in LOSS_OPTIONS.get(name, {}).items():
        source = f"{ACTOR}.policy_loss.{theirs}"
        if conversion.has(source) or source in conversion.defaults:
            conversion.carry(f"loss.{ours}", source, number, 1.0)


def divergence(conversion: Conversion) -> None:
    """Set KL in the loss and in the reward."""
    if conversion.get(f"{ACTOR}.use_kl_loss", boolean, False):
        conversion.carry("kl_loss.coef", f"{ACTOR}.kl_loss_coef", number, 0.001, f"{ACTOR}.use_kl_loss")
        conversion.carry("kl_loss.estimator", f"{ACTOR}.kl_loss_type", ESTIMATORS, "k3")
    if not conversion.get("algorithm.use_kl_in_reward", boolean, False):
        return
    control = "algorithm.kl_ctrl"
    conversion.carry("kl_reward.coef", f"{control}.kl_coef", number, 0.001, "algorithm.use_kl_in_reward")
    conversion.carry("kl_reward.estimator", "algorithm.kl_penalty", ESTIMATORS, "k1")
    if conversion.get(f"{control}.type", text, "fixed") == "adaptive":
        conversion.carry("kl_reward.target", f"{control}.target_kl", number, 0.1)
        conversion.carry("kl_reward.horizon", f"{control}.horizon", integer, 10000)


def engine(conversion: Conversion) -> None:
    """Set the engine, precision and strategy."""
    key, parallel, release = (f"{ROLLOUT}.{end}" for end in ("name", "tensor_model_parallel_size", "free_cache_engine"))
    name = conversion.get(key, text, "")
    engine_class = ENGINES.get(name.partition("_")[0])
    if engine_class is not None:
        conversion.set("rollout.engine", engine_class, key)
        conversion.carry("rollout.engine.launch.release_memory", release, boolean, True)
        if conversion.get(parallel, integer, 1) > 1:
            conversion.carry("rollout.engine.launch.tensor_parallel", parallel, integer, 1)
    elif conversion.has(key):
        conversion.ask(key, "rollout.engine: TorchEngine unless you set VllmEngine or SGLangEngine")
    conversion.set("fabric.precision", "bf16-mixed")
    strategy = f"{ACTOR}.strategy"
    divided = f"{ACTOR}.ulysses_sequence_parallel_size"
    if conversion.get(divided, integer, 1) > 1:
        conversion.set("fabric.strategy", "FSDP2", strategy)
        conversion.carry("fabric.strategy.sequence_parallel", divided, integer, 1)
    elif conversion.get("trainer.n_gpus_per_node", integer, 8) * conversion.get("trainer.nnodes", integer, 1) > 1:
        conversion.set("fabric.strategy", "fsdp2", strategy)
    if conversion.get(strategy, text, "fsdp") not in ("fsdp", "fsdp2"):
        conversion.note(strategy, "rlkit shards with FSDP2: fabric.strategy")


def validation(conversion: Conversion) -> None:
    """Set the sampling of validation and the filter of groups."""
    prefix = f"{ROLLOUT}.val_kwargs"
    samples = conversion.get(f"{prefix}.n", integer, 1) if conversion.get(f"{prefix}.do_sample", boolean, False) else 0
    rows = conversion.get("data.val_max_samples", integer, -1)
    if rows > 0:
        conversion.set("validation.limit", rows, "data.val_max_samples")
        conversion.note("data.val_max_samples", "validation.limit takes the first prompts, verl random ones")
    conversion.set("validation.samples", samples, f"{prefix}.n", f"{prefix}.do_sample")
    for name in ("temperature", "top_p", "top_k"):
        key = f"{prefix}.{name}"
        if samples and conversion.has(key):
            value = max(conversion.get(key, number, 0.0), 0.0)
            conversion.set(f"validation.sampling.{name}", int(value) if name == "top_k" else value, key)
    if samples and any(key.startswith("validation.sampling.") for key in conversion.recipe):
        budget = "data.max_response_length"
        conversion.carry("validation.sampling.max_tokens", budget, integer, 512)
    groups = "algorithm.filter_groups"
    if conversion.get(f"{groups}.enable", boolean, False):
        conversion.set("rollout.filter", "ZeroSignal", f"{groups}.enable")
        limit = f"{groups}.max_num_gen_batches"
        batches = conversion.get(limit, integer, 0)
        if batches <= 0:
            batches = 10
            conversion.note(limit, "verl has no limit; rollout.filter.max_refills is 9, at most 1000")
        conversion.set("rollout.filter.max_refills", batches - 1, limit)
        if conversion.get(f"{groups}.metric", text, "acc") == "acc":
            component = "acc" if conversion.has("custom_reward_function.path") else "accuracy"
            conversion.set("rollout.filter.component", component, f"{groups}.metric")


def model(conversion: Conversion) -> None:
    """Set adapters, values of config.json and the variables of the chat template."""
    template = "data.apply_chat_template_kwargs."
    for key in filter(lambda name: name.startswith(template), conversion.options.values):
        conversion.set(f"model.chat_template_kwargs.{key.removeprefix(template)}", conversion.options.values[key], key)
    replaced = f"{MODEL}.override_config."
    for key in filter(lambda name: name.startswith(replaced), conversion.options.values):
        name = key.removeprefix(replaced).removeprefix("model_config.")
        if name in ("output_router_logits", "router_aux_loss_coef"):
            conversion.note(key, "train.router_aux_loss_coef is the weight of the router's loss")
            continue
        option = "model.attention" if name == "attn_implementation" else f"model.config.{name}"
        conversion.set(option, conversion.options.values[key], key)
    if conversion.has("data.image_key") and not conversion.has(f"{ACTOR}.freeze_vision_tower"):
        conversion.set("model.vision.train", True, f"{ACTOR}.freeze_vision_tower")
    _adapters(conversion, MODEL, "model")


def _adapters(conversion: Conversion, prefix: str, section: str) -> None:
    """Set adapters from one of verl's two sections: `lora_rank`, or Megatron's `lora.rank`."""
    sections = (("lora_rank", "lora_alpha", "target_modules"), ("lora.rank", "lora.alpha", "lora.target_modules"))
    for rank, alpha, targets in (tuple(f"{prefix}.{end}" for end in ends) for ends in sections):
        if conversion.get(rank, integer, 0) <= 0:
            continue
        conversion.carry(f"{section}.lora.rank", rank, integer, 0)
        conversion.carry(f"{section}.lora.alpha", alpha, number, 32.0 if "lora.alpha" in alpha else 16.0)
        names = conversion.raw(targets)
        if names is not None and names == MEGATRON_LAYERS:
            conversion.set(f"{section}.lora.targets", "all-linear", targets)
        elif names is not None:
            conversion.set(f"{section}.lora.targets", names, targets)
            if "linear_" in str(names):
                conversion.ask(targets, "Megatron's names of layers; name those of the model, such as q_proj")
        kind = conversion.get(f"{prefix}.lora.type", text, "lora")
        if kind == "dora":
            conversion.set(f"{section}.lora.use_dora", True, f"{prefix}.lora.type")
        elif kind != "lora":
            conversion.ask(f"{prefix}.lora.type", "rlkit has LoRA, rsLoRA and DoRA")


FUNCTIONS = (
    task, model, steps, optimizer, advantage, loss, divergence, correction, reward, tools, engine, validation,
    partial(
        loggers, key="trainer.logger", classes=LOGGERS, project=("trainer.project_name", "verl_examples"),
        run_name="trainer.experiment_name",
    ),
    partial(truncation, prefix=f"{ROLLOUT}."),
)  # fmt: skip
