"""OpenRLHF's options (of `openrlhf.cli.train_ppo_ray`), and the rule of each."""

from __future__ import annotations

from rlkit_convert.conversion import Conversion
from rlkit_convert.parts import set_steps
from rlkit_convert.pools import IN_TRAINER, OwnGpus, place
from rlkit_convert.rules import ByHand, Equivalent, NoEquivalent, Rule, equivalents, read_together, without_equivalent
from rlkit_convert.shell import commands, flags
from rlkit_convert.source import PeerOptions
from rlkit_convert.values import boolean, choice, integer, number, number_or_text, text

DEFAULTS: dict[str, object] = {
    "actor.adam.lr": 1e-6, "actor.adam.betas": [0.9, 0.95], "actor.eps_clip": 0.2, "actor.lr_scheduler": "cosine",
    "actor.lr_warmup_ratio": 0.03, "actor.min_lr_ratio": 0.1, "algo.advantage.estimator": "gae",
    "algo.kl.init_coef": 0.01, "data.input_key": "input", "rollout.batch_size": 1024, "train.batch_size": 128,
    "rollout.n_samples_per_prompt": 1, "train.num_episodes": 1, "train.seed": 42, "ckpt.save_steps": -1,
}  # fmt: skip
"""OpenRLHF's defaults that differ from rlkit's."""
ADVANTAGES = {
    "gae": "GAE", "reinforce": "ReinforcePP", "rloo": "RLOO", "reinforce_baseline": "ReinforcePPBaseline",
    "group_norm": "GRPO", "dr_grpo": "GRPO",
}  # fmt: skip
SCHEDULES = {
    "constant": "Constant", "constant_with_warmup": "Constant", "cosine": "Cosine", "cosine_with_min_lr": "Cosine",
    "linear": "Linear",
}  # fmt: skip
ROLES = {"critic": "critic", "ref": "reference", "reward": "reward"}
"""rlkit's roles of the models beside the policy."""
TOGETHER = ("train.colocate_all", "train.colocate_fsdp_models")
"""Options by which all models share the policy's GPUs."""
OLDER_NAMES = {
    "pretrain": "actor.model_name_or_path", "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path", "remote_rm_url": "reward.remote_url",
    "agent_func_path": "train.agent_func_path", "prompt_data": "data.prompt_dataset", "input_key": "data.input_key",
    "label_key": "data.label_key", "input_template": "data.input_template", "max_samples": "data.max_samples",
    "apply_chat_template": "data.apply_chat_template", "prompt_max_len": "rollout.max_prompt_len",
    "generate_max_len": "rollout.max_new_tokens", "rollout_batch_size": "rollout.batch_size",
    "train_batch_size": "train.batch_size", "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "temperature": "rollout.temperature", "top_p": "rollout.top_p", "max_epochs": "train.max_epochs",
    "num_episodes": "train.num_episodes", "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr", "eps_clip": "actor.eps_clip", "dual_clip": "actor.dual_clip",
    "eps_clip_low_high": "actor.eps_clip_low_high", "value_clip": "critic.value_clip",
    "advantage_estimator": "algo.advantage.estimator", "gamma": "algo.advantage.gamma",
    "lambd": "algo.advantage.lambd", "init_kl_coef": "algo.kl.init_coef", "kl_estimator": "algo.kl.estimator",
    "use_kl_loss": "algo.kl.use_loss", "kl_target": "algo.kl.target", "entropy_loss_coef": "actor.entropy_coef",
    "normalize_reward": "reward.normalize_enable", "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range", "async_train": "train.async_enable",
    "lora_rank": "ds.lora.rank", "lora_alpha": "ds.lora.alpha", "target_modules": "ds.lora.target_modules",
    "lora_dropout": "ds.lora.dropout", "load_in_4bit": "ds.load_in_4bit", "seed": "train.seed",
    "actor_num_nodes": "actor.num_nodes", "actor_num_gpus_per_node": "actor.num_gpus_per_node",
    "vllm_num_engines": "vllm.num_engines", "vllm_tensor_parallel_size": "vllm.tensor_parallel_size",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable", "save_steps": "ckpt.save_steps",
    "eval_steps": "eval.steps", "eval_dataset": "eval.dataset", "use_wandb": "logger.wandb.key",
    "wandb_project": "logger.wandb.project", "wandb_run_name": "logger.wandb.run_name",
    "enable_ema": "train.enable_ema", "freezing_actor_steps": "critic.freezing_steps",
    "overlong_buffer_len": "reward.overlong_buffer_len", "enable_vllm_is_correction":
    "algo.advantage.is_correction_enable", "policy_loss_type": "actor.policy_loss_type",
    "no_advantage_std_norm": "algo.advantage.no_std_norm", "kl_horizon": "algo.kl.horizon",
    "vllm_is_truncated_threshold": "algo.advantage.is_correction_threshold",
    "vllm_is_correction_type": "algo.advantage.is_correction_type", "use_icepop": "algo.advantage.use_icepop",
    "lr_warmup_ratio": "actor.lr_warmup_ratio", "lr_scheduler": "actor.lr_scheduler", "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay", "max_norm": "actor.max_norm", "aux_loss_coef": "actor.aux_loss_coef",
    "eval_temperature": "eval.temperature", "eval_n_samples_per_prompt": "eval.n_samples_per_prompt",
    "eval_split": "eval.split", "prompt_split": "data.prompt_split", "prompt_data_probs": "data.prompt_probs",
    "max_len": "data.max_len", "async_queue_size": "train.async_queue_size", "ema_beta": "train.ema_beta",
    "partial_rollout": "train.partial_rollout_enable", "overlong_penalty_factor": "reward.overlong_penalty_factor",
    "reward_clip_range": "reward.clip_range", "full_determinism": "train.full_determinism_enable",
    "stop_properly_penalty_coef": "reward.stop_properly_penalty_coef",
    "colocate_all_models": "train.colocate_all", "colocate_actor_ref": "train.colocate_actor_ref",
    "colocate_critic_reward": "train.colocate_critic_reward",
    **{f"{role}_num_{unit}": f"{role}.num_{unit}" for role in ROLES for unit in ("nodes", "gpus_per_node")},
}  # fmt: skip
"""Names of versions before 0.10, and those of later ones."""

MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory (default: auto), and the gradient is the same"
DEVICES = "where a run takes place is set in the section `fabric:`; engines on GPUs of their own are VllmServer"
OVERLONG = "reward Composite, of yours and Overlong"
REMEDIES = {
    "*.micro_batch_size train.dynamic_batch_enable *.max_tokens_per_gpu micro_* use_dynamic_batch": MICRO,
    "*.num_gpus_per_node *.num_nodes *_num_nodes *_num_gpus_per_node vllm.num_engines": DEVICES,
    "train.colocate_* colocate_* ds.enable_sleep vllm.enable_sleep *_enable_sleep": DEVICES,
    "ds.* zero_stage bf16 adam_offload packing_samples flash_attn ring_* zpg": "fabric.strategy: fsdp2 shards over all "
    "ranks; padding is removed if the model allows it",
    "*.offload *_offload": "train.offload_during_rollout covers it",
    "vllm.* vllm_* enforce_eager enable_prefix_caching": "an argument of the engine, in rollout.engine.launch.args",
    "actor.gradient_checkpointing_reentrant gradient_checkpointing_*": "nothing to do",
    "ckpt.load_enable load_checkpoint": "rlkit fit --resume RUN, or --resume auto with --out",
    "ckpt.* save_path ckpt_path save_hf_ckpt": "rlkit fit --out FOLDER; rlkit export writes a Hugging Face folder",
    "logger.* use_tensorboard": "log.loggers: Wandb or TensorBoard",
    "local_rank use_ms train.full_determinism_enable data.dataloader_num_workers": "nothing to do",
    "data.disable_fast_tokenizer": "nothing to do",
    "critic.save_value_network save_value_network": "nothing to do: a checkpoint also holds the critic",
    "data.max_images_per_prompt": "nothing to do: a prompt may have any number",
    "eval.split": "task.validation_split",
    "rollout.vllm_generate_batch_size": "rollout.oversample starts more prompts than a step trains on",
}  # fmt: skip


def paths(value: object) -> str | list[str]:
    """Return a path, or several files that commas separate.

    Raises:
        ValueError: The value is a mapping or a list, or names several data sets of the hub.
    """
    names = text(value).split(",")
    if len(names) > 1 and not all(name.endswith((".json", ".jsonl", ".parquet", ".csv")) for name in names):
        raise ValueError("expected a data set, or files; task Mix mixes several data sets")
    return names if len(names) > 1 else names[0]


RULES: dict[str, Rule] = {
    **read_together({
        "actor.": "adam.betas lr_scheduler min_lr_ratio eps_clip* dual_clip policy_loss_type",
        "critic.": "model_name_or_path adam.lr value_clip lr_warmup_ratio freezing_steps num_nodes num_gpus_per_node",
        "ref.": "num_nodes num_gpus_per_node",
        "algo.": "advantage.is_correction_* advantage.* kl.* dynamic_filtering_enable",
        "reward.": "model_name_or_path remote_url num_nodes num_gpus_per_node",
        "data.": "input_key label_key input_template apply_chat_template max_len",
        "train.": "batch_size num_episodes async_* enable_ema ema_beta colocate_all colocate_fsdp_models "
        "colocate_actor_ref colocate_critic_reward",
        "ds.": "lora.rank lora.alpha lora.target_modules",
        "vllm.": "tensor_parallel_size",
        "eval.": "steps temperature",
        "logger.": "wandb.*",
    }),
    **equivalents(text, {
        "actor.model_name_or_path": "model.path", "data.prompt_split": "task.train_split",
        "eval.dataset": "task.validation_path",
    }),
    **equivalents(integer, {
        "actor.num_gpus_per_node": "fabric.devices", "actor.num_nodes": "fabric.num_nodes",
        "data.max_samples": "train.max_rows", "rollout.max_prompt_len": "rollout.max_prompt_tokens",
        "rollout.max_new_tokens": "rollout.sampling.max_tokens", "rollout.batch_size": "train.prompts_per_step",
        "rollout.n_samples_per_prompt": "rollout.group_size", "train.max_epochs": "train.epochs",
        "train.seed": "train.seed", "eval.n_samples_per_prompt": "validation.samples", "ckpt.max_num": "save.keep_last",
    }),
    **equivalents(number, {
        "actor.adam.lr": "train.lr", "actor.adam.eps": "train.optimizer.eps",
        "actor.adam.weight_decay": "train.weight_decay", "actor.max_norm": "train.max_grad_norm",
        "actor.lr_warmup_ratio": "train.warmup_ratio", "actor.entropy_coef": "train.entropy_coef",
        "actor.aux_loss_coef": "train.router_aux_loss_coef", "rollout.temperature": "rollout.sampling.temperature",
    }),
    **equivalents(boolean, {"actor.gradient_checkpointing_enable": "train.checkpoint_activations"}),
    "actor.optim": ByHand("train.optimizer: Muon, with its options", ("adam",)),
    "*.muon.*": NoEquivalent("options of train.optimizer: Muon"),
    "actor.freeze_visual_encoder": Equivalent("model.vision.train", lambda frozen: not boolean(frozen)),
    "critic.max_epochs": ByHand("the critic trains on the policy's mini-batches: train.epochs", (1,)),
    "algo.dynamic_filtering_range": ByHand("ZeroSignal drops groups of equal rewards", ([0.0, 1.0], [0, 1])),
    "reward.normalize_enable": ByHand("shaping.normalize divides by the running standard deviation"),
    "reward.clip_range": ByHand("shaping.clip, one bound for both signs"),
    "reward.overlong_*": ByHand(OVERLONG),
    "reward.stop_properly_penalty_coef": ByHand("reward Overlong falls as completions approach the limit"),
    "data.prompt_dataset": Equivalent("task.path", paths),
    "data.prompt_probs": ByHand("task Mix mixes several data sets by weight"),
    "data.image_key": ByHand("the task HFDataset reads the column `images`; rename yours", ("images",)),
    "rollout.top_p": ByHand("rollout.sampling.top_p, with top_k", (1.0,)),
    "train.agent_func_path": ByHand("an environment or an agent of your own: rlkit docs tools-and-environments"),
    "train.partial_rollout_enable": ByHand("nothing stops a request: engines continue it with new weights"),
    "ds.lora.dropout": ByHand("rlkit's adapters have no dropout"),
    "ds.load_in_4bit": Equivalent("model.quantization", lambda value: "nf4" if boolean(value) else None),
    "ckpt.save_steps": Equivalent("save.every", lambda value: max(integer(value), 0)),
    **without_equivalent(REMEDIES),
    "critic.*": ByHand("see the section `critic:`"),
}  # fmt: skip


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of the commands in a shell script, those in arrays included; then the overrides."""
    options = PeerOptions()
    for words in [*commands(content, name), overrides]:
        start = next((index + 1 for index, word in enumerate(words) if word.startswith("openrlhf.cli.")), 0)
        if start or (words and words[0].startswith("--")):
            for key, values in flags(words[start:]):
                newer = options.rename(key, OLDER_NAMES)
                if len(values) > 1:
                    options.values[newer] = [number_or_text(value) for value in values]
                else:
                    options.add(newer, values[0] if values else "true")
    return options


def task(conversion: Conversion) -> None:
    """Set the task, its columns, and the chat template."""
    conversion.set("task", "HFDataset", "data.prompt_dataset")
    column = conversion.get("data.input_key", text, "input")
    template = conversion.get("data.input_template", text, "").replace("\\n", "\n")
    if template:
        filled = template.replace("{}", f"{{{column}}}")
        conversion.set("task.template", filled, "data.input_template", "data.input_key")
    else:
        conversion.set("task.prompt_field", column, "data.input_key")
    conversion.set("task.answer_field", conversion.raw("data.label_key"), "data.label_key")
    if not conversion.get("data.apply_chat_template", boolean, False):
        conversion.set("model.chat_template", "plain", "data.apply_chat_template")
    total, completion = conversion.get("data.max_len", integer, 0), conversion.get("rollout.max_new_tokens", integer, 0)
    if total and not completion:
        conversion.ask("data.max_len", "it bounds prompt and completion together: set rollout.sampling.max_tokens")
    elif total > completion and not conversion.has("rollout.max_prompt_len"):
        conversion.set("rollout.max_prompt_tokens", total - completion, "data.max_len", "rollout.max_new_tokens")


def training(conversion: Conversion) -> None:
    """Set mini-batches, the length of the run, the optimizer and adapters."""
    prompts = conversion.get("rollout.batch_size", integer, 1024)
    samples = prompts * conversion.get("rollout.n_samples_per_prompt", integer, 1)
    update = max(conversion.get("train.batch_size", integer, 128), 1)
    conversion.set("train.minibatches", max(round(samples / update), 1), "train.batch_size", "rollout.batch_size")
    if samples % update:
        conversion.note("train.batch_size", f"{samples} samples of a step are not a multiple of {update}")
    episodes = conversion.get("train.num_episodes", number, 1.0)
    set_steps(conversion, "train.num_episodes", episodes, prompts, conversion.raw("data.prompt_dataset"))
    conversion.set("train.optimizer.betas", conversion.raw("actor.adam.betas", [0.9, 0.95]), "actor.adam.betas")
    schedule = conversion.get("actor.lr_scheduler", choice(SCHEDULES), "Cosine")
    conversion.set("train.schedule", schedule, "actor.lr_scheduler")
    if schedule != "Constant":
        conversion.carry("train.schedule.min_lr_ratio", "actor.min_lr_ratio", number, 0.1)
    if conversion.get("train.enable_ema", boolean, False):
        conversion.carry("train.ema", "train.ema_beta", number, 0.992, "train.enable_ema")
    if conversion.get("train.async_enable", boolean, False):
        conversion.carry("rollout.max_staleness", "train.async_queue_size", integer, 1, "train.async_enable")
    if conversion.get("ds.lora.rank", integer, 0) > 0:
        conversion.carry("model.lora.rank", "ds.lora.rank", integer, 0)
        conversion.carry("model.lora.alpha", "ds.lora.alpha", number, 16.0)
        if conversion.has("ds.lora.target_modules"):
            conversion.set("model.lora.targets", conversion.raw("ds.lora.target_modules"), "ds.lora.target_modules")


def algorithm(conversion: Conversion) -> None:
    """Set the estimator, the critic, the loss, KL, the correction and the filter of groups."""
    key = "algo.advantage.estimator"
    estimator = conversion.get(key, text, "gae")
    advantage = conversion.get(key, choice(ADVANTAGES), "")
    if advantage:
        conversion.set("advantage", advantage, key)
    if estimator == "dr_grpo" or conversion.get("algo.advantage.no_std_norm", boolean, False):
        if advantage == "GRPO":
            conversion.set("advantage.scale_by_std", False, key, "algo.advantage.no_std_norm")
        else:
            conversion.ask("algo.advantage.no_std_norm", "an option of advantage GRPO: scale_by_std")
    if advantage == "GAE":
        _critic(conversion)
    elif conversion.get("critic.freezing_steps", integer, 0) > 0:
        conversion.ask("critic.freezing_steps", "without a critic every step trains the policy")
    _loss(conversion)
    if conversion.get("algo.kl.init_coef", number, 0.01) > 0:
        section = "kl_loss" if conversion.get("algo.kl.use_loss", boolean, False) else "kl_reward"
        conversion.carry(f"{section}.coef", "algo.kl.init_coef", number, 0.01, "algo.kl.use_loss")
        conversion.carry(f"{section}.estimator", "algo.kl.estimator", text, "k1")
        if section == "kl_reward" and conversion.has("algo.kl.target"):
            conversion.carry("kl_reward.target", "algo.kl.target", number, 0.1)
            conversion.carry("kl_reward.horizon", "algo.kl.horizon", integer, 10000)
    if conversion.get("algo.advantage.is_correction_enable", boolean, False):
        _correction(conversion)
    if conversion.get("algo.dynamic_filtering_enable", boolean, False):
        conversion.set("rollout.filter", "ZeroSignal", "algo.dynamic_filtering_enable")


def _loss(conversion: Conversion) -> None:
    """Set the loss, its bounds and the weight of tokens."""
    bounds = conversion.raw("actor.eps_clip_low_high")
    single = conversion.get("actor.eps_clip", number, 0.2)
    low, high = bounds if isinstance(bounds, list) and len(bounds) == 2 else (single, single)
    is_sequence = conversion.get("actor.policy_loss_type", text, "ppo") == "gspo"
    conversion.set("loss", "GSPO" if is_sequence else "ClipLoss", "actor.policy_loss_type")
    for name, bound in (("low", low), ("high", high)):
        conversion.set(f"loss.clip_{name}", bound, "actor.eps_clip_low_high", "actor.eps_clip")
    if conversion.has("actor.dual_clip") and not is_sequence:
        conversion.carry("loss.clip_dual", "actor.dual_clip", number, 3.0)
    elif conversion.has("actor.dual_clip"):
        conversion.ask("actor.dual_clip", "an option of loss ClipLoss; GSPO has no second bound")
    conversion.set("train.aggregation", "seq_mean_token_mean" if is_sequence else "token_mean")


def _correction(conversion: Conversion) -> None:
    """Set the weights between engine and trainer: capped from above, or 0 outside of both bounds (IcePop)."""
    switch, kind_key, limits_key, icepop = (
        f"algo.advantage.{name}"
        for name in ("is_correction_enable", "is_correction_type", "is_correction_threshold", "use_icepop")
    )
    limits = conversion.raw(limits_key)
    low, high = limits if isinstance(limits, list) and len(limits) == 2 else (0.5, 5.0)
    conversion.set("correction.high", high, switch, limits_key)
    kind = "icepop" if conversion.get(icepop, boolean, False) else conversion.get(kind_key, text, "tis")
    if kind == "icepop":
        conversion.set("correction.low", low, switch, limits_key, kind_key, icepop)
    elif kind == "tis":
        conversion.ask(switch, "correction caps weights from above, and raises none to the lower threshold")
    else:
        conversion.ask(kind_key, "see the sections `correction:` and `rejection:`")


def _critic(conversion: Conversion) -> None:
    conversion.carry("advantage.gamma", "algo.advantage.gamma", number, 1.0)
    conversion.carry("advantage.lam", "algo.advantage.lambd", number, 1.0)
    conversion.carry("critic.lr", "critic.adam.lr", number, 9e-6)
    conversion.carry("critic.clip", "critic.value_clip", number, 0.5)
    conversion.carry_given("critic.warmup_ratio", "critic.lr_warmup_ratio", number, 0.03)
    conversion.carry_given("critic.path", "critic.model_name_or_path", text, "")
    if conversion.get("critic.freezing_steps", integer, 0) > 0:
        conversion.carry("critic.policy_delay_steps", "critic.freezing_steps", integer, 0)


def reward(conversion: Conversion) -> None:
    """Set the reward; code and services of the user are named."""
    model = conversion.get("reward.model_name_or_path", text, "")
    url = conversion.get("reward.remote_url", text, "")
    if "," in model:
        conversion.ask("reward.model_name_or_path", "reward Composite, of a ModelReward for each")
    elif model and not url:
        conversion.set("reward", "ModelReward", "reward.model_name_or_path")
        conversion.set("reward.path", model, "reward.model_name_or_path")
    elif url.endswith(".py"):
        conversion.ask("reward.remote_url", "write f(text, answer) to a file; PythonReward with function: file.py:name")
    elif url:
        conversion.ask("reward.remote_url", "RemoteReward, whose service answers in another form: rlkit docs servers")
    elif not conversion.has("train.agent_func_path"):
        conversion.ask("algo.advantage.estimator", "there is no reward in this file; set `reward:`")


def running(conversion: Conversion) -> None:
    """Set the engine, validation and the loggers."""
    conversion.set("rollout.engine", "VllmEngine", "vllm.tensor_parallel_size")
    if conversion.get("vllm.tensor_parallel_size", integer, 1) > 1:
        key = "vllm.tensor_parallel_size"
        conversion.carry("rollout.engine.launch.tensor_parallel", key, integer, 1)
    conversion.set("fabric.precision", "bf16-mixed")
    steps = conversion.get("eval.steps", integer, -1)
    if steps > 0:
        conversion.set("validation.every", steps, "eval.steps")
    conversion.carry_given("validation.sampling.temperature", "eval.temperature", number, 0.6)
    if conversion.has("logger.wandb.key") or conversion.has("logger.wandb.project"):
        project = conversion.get("logger.wandb.project", text, "openrlhf_train_ppo")
        options = {"project": project, "name": conversion.get("logger.wandb.run_name", text, "") or None}
        loggers = [{"class_path": "Wandb", "init_args": options}]
        sources = (f"logger.wandb.{name}" for name in ("key", "project", "run_name"))
        conversion.set("log.loggers", loggers, *filter(conversion.has, sources))


def placement(conversion: Conversion) -> None:
    """Put models with GPUs of their own into pools; those that share the policy's GPUs are in the trainer."""
    together, with_policy, with_reward = (
        [key for key in keys if conversion.get(key, boolean, False)]
        for keys in (TOGETHER, ("train.colocate_actor_ref",), ("train.colocate_critic_reward",))
    )
    for name, role in ROLES.items():
        gpus, nodes = f"{name}.num_gpus_per_node", f"{name}.num_nodes"
        shared = together or (with_policy if role == "reference" else [])
        if shared:
            for key in filter(conversion.has, (gpus, nodes, *shared)):
                conversion.note(key, IN_TRAINER)
        else:
            also = () if role == "reference" else tuple(with_reward)
            pool = "critic_reward" if also else role
            place(conversion, OwnGpus(role, pool, gpus, nodes, also))


FUNCTIONS = (task, training, algorithm, reward, running, placement)
