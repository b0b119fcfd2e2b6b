"""TRL's options, those of GRPO, RLOO and PPO with their scripts, and what becomes of each."""

from __future__ import annotations

from rlkit.cli.convert.source import Given, lines_of, of_yaml
from rlkit.cli.convert.table import READ, Rule, To, Without, flag, number, one_of, text, unlimited, whole

TRAINER = "the trainer"
"""Where a reading keeps which trainer the options are of: grpo, rloo or ppo."""
TRAINERS = ("grpo", "rloo", "ppo")

ENGINE = "an argument of the engine; SGLang's go into rollout.engine.launch.args"
MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory in tokens, auto by default, never the gradient"
HUB = "rlkit export writes a Hugging Face folder, which `hf upload` takes"
QUANTISED = "rlkit trains no quantised base; model.dtype: bfloat16 is the smallest"
SHOWN = "nothing to do: rollouts are kept in the run folder; log.rollouts"
ENTROPY = "train.entropy_coef is constant"

ALL_DEFAULTS: dict[str, object] = {
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-6,
    "lr_scheduler_type": "linear",
    "max_completion_length": 512,
    "gradient_checkpointing": True,
    "eval_strategy": "no",
    "save_steps": 500,
}
OWN_DEFAULTS: dict[str, dict[str, object]] = {
    "grpo": {"num_generations": 8, "beta": 0.0, "loss_type": "dapo", "scale_rewards": "group"},
    "rloo": {"num_generations": 2, "beta": 0.05},
    "ppo": {
        "kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "response_length": 53,
        "temperature": 0.7, "num_ppo_epochs": 4, "num_mini_batches": 1, "learning_rate": 5e-5,
    },
}  # fmt: skip
"""TRL's defaults that differ from rlkit's, of all trainers and of each."""

HINTS = {
    "rloo": {"normalize_advantages", "rloo_k", "reward_clip_range"},
    "ppo": {"kl_coef", "vf_coef", "cliprange", "cliprange_value", "num_ppo_epochs", "reward_model_path"},
}
"""Options that only one of the trainers has."""


def steps_between(value: object) -> int:
    """Return an interval in steps.

    Raises:
        ValueError: It is a share of all steps.
    """
    if 0 < number(value) < 1:
        raise ValueError("expected a number of steps")
    return whole(value)


OTHERS = {
    "optim_args optim_target_modules": "options of train.optimizer",
    "average_tokens_across_devices": "nothing to do: tokens are counted over all ranks",
    "label_smoothing_factor neftune_noise_alpha": "options of loss CrossEntropy alone",
    "bf16_full_eval fp16_full_eval": "nothing to do: validation computes as training does, in fabric.precision",
    "tf32": "float32 is float32 in rlkit; fabric.precision: bf16-mixed is faster",
    "activation_checkpointing activation_checkpointing_kwargs": "train.checkpoint_activations",
    "torch_compile* liger_kernel_config use_cache torch_empty_cache_steps": "nothing to do: no option of the learning",
    "auto_find_batch_size": MICRO,
    "include_* disable_tqdm skip_memory_metrics debug": "nothing to do: all metrics are in metrics.jsonl",
    "trackio_*": "a logger of your own: rlkit plugins new NAME --kind logger",
    "eval_* batch_eval_metrics prediction_loss_only label_names": "see the section `validation:`",
    "save_only_model": "final/ in the run folder is the model alone; checkpoints hold all that a run needs to go on",
    "save_on_each_node": "nothing to do: all nodes see the run folder",
    "enable_jit_checkpoint": "nothing to do: a signal saves a checkpoint",
    "load_best_model_at_end metric_for_best_model greater_is_better": "save.keep_best keeps the best by a metric",
    "ignore_data_skip restore_callback_states_from_checkpoint": "nothing to do: a resumed run goes on as it was",
    "full_determinism data_seed": "nothing to do: train.seed determines the order of prompts and every sample",
    "use_cpu": "fabric.accelerator: cpu",
    "accelerator_config parallelism_config local_rank": "where a run takes place: the section `fabric:`",
    "train_sampling_strategy length_column_name": "nothing to do: groups are divided among ranks by their length",
    "do_train do_eval do_predict": "nothing to do: rlkit fit trains, rlkit validate validates",
    "vespo_*": "rlkit has no VESPO; losses: rlkit docs algorithms",
    "transformers_* ignore_bias_buffers": "nothing to do",
}
"""What to do about other options, those of transformers' trainer among them."""

RULES: dict[str, Rule] = {
    TRAINER: READ,
    "model_name_or_path": To("model.path", text),
    "sft_model_path": To("model.path", text),
    "trust_remote_code": To("model.trust_remote_code", flag),
    "attn_implementation": To(
        "model.attention", one_of({n: n for n in ("sdpa", "eager", "flash_attention_2", "flash_attention_3")})
    ),
    "dtype": READ,
    "torch_dtype": READ,
    "use_peft": READ,
    "lora_*": READ,
    "use_rslora": Without("rlkit scales by alpha / rank; set model.lora.alpha to alpha * sqrt(rank)"),
    "use_dora": Without("rlkit has no DoRA"),
    "load_in_*": Without(QUANTISED),
    "bnb_*": Without(QUANTISED),
    "use_bnb_*": Without(QUANTISED),
    "model_revision": Without("download that revision to a folder, and set model.path to it"),
    "model_init_kwargs": Without("model.dtype and model.attention"),
    "chat_template_kwargs": To("model.chat_template_kwargs"),
    "chat_template_path": Without("put the template into the model's folder"),
    "dataset_name": To("task.path", text),
    "dataset_config": To("task.name", text),
    "dataset_train_split": To("task.train_split", text),
    "dataset_test_split": To("task.validation_split", text),
    "dataset_streaming": Without("nothing to do: rows are read from tables on the disk"),
    "datasets": Without("task Mix mixes several, by weight"),
    "reward_funcs": READ,
    "reward_model_name_or_path": READ,
    "reward_model_path": READ,
    "reward_weights": READ,
    "multi_objective_aggregation": READ,
    "value_model_path": READ,
    "max_prompt_length": To("rollout.max_prompt_tokens", whole),
    "max_completion_length": To("rollout.sampling.max_tokens", whole),
    "response_length": To("rollout.sampling.max_tokens", whole),
    "num_generations": READ,
    "rloo_k": READ,
    "temperature": To("rollout.sampling.temperature", number),
    "top_p": To("rollout.sampling.top_p", unlimited(1)),
    "top_k": To("rollout.sampling.top_k", lambda value: int(unlimited(0, -1)(value))),
    "min_p": To("rollout.sampling.min_p", unlimited(0)),
    "repetition_penalty": Without("its log-probs are not those of the trainer; rlkit has none"),
    "generation_kwargs": Without("see rollout.sampling"),
    "num_generations_eval": Without("validation.samples"),
    "use_vllm": READ,
    "vllm_mode": READ,
    "vllm_tensor_parallel_size": READ,
    "vllm_importance_sampling_*": READ,
    "vllm_gpu_memory_utilization": Without(
        "rollout.engine.launch.memory_fraction is the share of what is free when a server starts, 0.4 by default"
    ),
    "vllm_server_*": Without("rollout.engine SGLangServer with urls of running servers"),
    "vllm_enable_sleep_mode": Without("rollout.engine.launch.release_memory"),
    "vllm_*": Without(ENGINE),
    "per_device_train_batch_size": READ,
    "gradient_accumulation_steps": READ,
    "steps_per_generation": READ,
    "generation_batch_size": READ,
    "num_processes": READ,
    "num_iterations": READ,
    "num_ppo_epochs": READ,
    "num_mini_batches": READ,
    "max_steps": READ,
    "num_train_epochs": READ,
    "total_episodes": READ,
    "learning_rate": To("train.lr", number),
    "weight_decay": To("train.weight_decay", number),
    "max_grad_norm": To("train.max_grad_norm", number),
    "lr_scheduler_type": READ,
    "lr_scheduler_kwargs": Without("options of train.schedule"),
    "warmup_ratio": To("train.warmup_ratio", number),
    "warmup_steps": READ,
    "adam_beta1": READ,
    "adam_beta2": READ,
    "adam_epsilon": To("train.optimizer.eps", number),
    "optim": READ,
    "seed": To("train.seed", whole),
    "gradient_checkpointing": To("train.checkpoint_activations", flag),
    "gradient_checkpointing_kwargs": Without("nothing to do"),
    "bf16": READ,
    "fp16": Without("fabric.precision: bf16-mixed"),
    "beta": READ,
    "use_bias_correction_kl": READ,
    "kl_coef": READ,
    "kl_estimator": READ,
    "epsilon": READ,
    "epsilon_high": READ,
    "delta": READ,
    "sapo_temperature_*": READ,
    "cliprange": READ,
    "cliprange_value": READ,
    "vf_coef": Without("nothing to do: the critic has an optimizer of its own; critic.lr"),
    "gamma": READ,
    "lam": READ,
    "whiten_rewards": Without("shaping.normalize divides by the running standard deviation"),
    "missing_eos_penalty": Without("reward Overlong falls where answers come near the limit"),
    "stop_token*": Without("nothing to do: the model's own end tokens; rollout.sampling.stop_ids adds some"),
    "loss_type": READ,
    "importance_sampling_level": READ,
    "scale_rewards": READ,
    "normalize_advantages": READ,
    "reward_clip_range": READ,
    "mask_truncated_completions": Without("reward Overlong lowers the reward of answers that are cut off"),
    "sync_ref_model": READ,
    "ref_model_*": READ,
    "top_entropy_quantile": Without("rlkit trains on all tokens; losses ClipCov and KLCov choose some"),
    "entropy_coef": To("train.entropy_coef", number),
    "use_adaptive_entropy": Without(ENTROPY),
    "entropy_*": Without(ENTROPY),
    "off_policy_mask_threshold": To("train.off_policy_mask_threshold", number),
    "max_tool_calling_iterations": Without("conversation.turns, beside `tools:`"),
    "report_to": READ,
    "run_name": READ,
    "project": READ,
    "output_dir": Without("rlkit fit --out FOLDER"),
    "overwrite_output_dir": Without("rlkit fit --out FOLDER, a new one for each run"),
    "logging_steps": Without("nothing to do: every step is logged"),
    "logging_*": Without("nothing to do: every step is logged"),
    "log_*": Without(SHOWN),
    "num_completions_to_print": Without(SHOWN),
    "save_steps": To("save.every", steps_between),
    "save_total_limit": To("save.keep_last", whole),
    "save_strategy": READ,
    "eval_strategy": READ,
    "eval_steps": READ,
    "eval_on_start": To("validation.before", flag),
    "per_device_eval_batch_size": Without("nothing to do: all validation prompts are answered together"),
    "resume_from_checkpoint": Without("rlkit fit --resume RUN, or --resume auto with --out"),
    "push_to_hub": Without(HUB),
    "hub_*": Without(HUB),
    "config_file": Without("accelerate's file says where a run takes place: the section `fabric:`"),
    "accelerate_config": Without("where a run takes place: the section `fabric:`"),
    "config": Without("its file sets more options; convert it with the others after it"),
    "deepspeed": Without("fabric.strategy: fsdp2 shards over all ranks"),
    "fsdp*": Without("fabric.strategy: fsdp2 shards over all ranks"),
    "ds3_gather_for_generation": Without("nothing to do: there is no DeepSpeed"),
    "ddp_*": Without("fabric.strategy"),
    "num_machines": To("fabric.num_nodes", whole),
    "mixed_precision": Without("fabric.precision"),
    "use_liger*": Without("nothing to do: log-probs are computed in slices without it"),
    "shuffle_dataset": Without("nothing to do: rlkit shuffles; curriculum Difficulty orders by a column"),
    "remove_unused_columns": Without("nothing to do: all columns are kept for the reward"),
    "disable_dropout": Without("nothing to do: log-probs are always computed without dropout"),
    "dataloader_*": Without("nothing to do: rows are read in the run's process"),
    "local_rollout_forward_batch_size": Without(MICRO),
    "cache_implementation": Without("nothing to do: TorchEngine has a cache of its own"),
    "use_transformers_*": Without("nothing to do: TorchEngine samples continuously"),
    "cast_lm_head_to_fp32": Without("nothing to do: log-probs are computed in float32"),
    "router_aux_loss_coef": Without("rlkit has no loss of a router"),
    "pad_to_multiple_of": Without("nothing to do"),
    **{name: Without(remedy) for names, remedy in OTHERS.items() for name in names.split()},
}


def defaults(given: Given) -> dict[str, object]:
    """Return TRL's defaults for the trainer that the options are of."""
    own = OWN_DEFAULTS[str(given.values[TRAINER])]
    return {**ALL_DEFAULTS, **own} if "response_length" not in own else {
        **{key: value for key, value in ALL_DEFAULTS.items() if key != "max_completion_length"}, **own}  # fmt: skip


def read(content: str, name: str, more: list[str]) -> Given:
    """Return the options of a YAML file or of the command in a shell script, with more of them after it."""
    if name.lower().endswith((".yaml", ".yml")):
        given = of_yaml(content, name, nested=False)
        words: list[str] = []
    else:
        given = Given()
        words = next((line for line in lines_of(content, name) if _is_command(line)), [])
    _add_flags(given, [*words, *more])
    trainer = next((one for one in TRAINERS for word in words if one in _script(word)), None)
    trainer = trainer or next((one for one, names in HINTS.items() if names & given.values.keys()), "grpo")
    if given.values or given.unknown:
        given.values[TRAINER] = trainer
    return given


def _is_command(words: list[str]) -> bool:
    return any(word.startswith("--") for word in words)


def _script(word: str) -> str:
    """Return a word that may name a trainer: a verb of `trl`, or a Python file."""
    return word if word in TRAINERS or word.endswith(".py") else ""


def _add_flags(given: Given, words: list[str]) -> None:
    """Note `--option value`, `--option=value`, `--option` alone, which is true, and `--option a b`, a list."""
    key, done = "", False
    values: list[str] = []
    for word in [*words, "--"]:
        if word.startswith("--") or word.endswith(".py") or (word in TRAINERS and (values or not key)):
            if key and len(values) < 2:
                given.add(key, values[0] if values else "true")
            elif key:
                given.values[key] = values
            name, equals, value = word.removeprefix("--").partition("=")
            key, values, done = (name.replace("-", "_") if word.startswith("--") else ""), [], bool(equals)
            values += [value] * bool(equals)
        elif key and not done:
            values.append(word)
