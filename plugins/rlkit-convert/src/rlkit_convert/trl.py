"""TRL's options (GRPO, RLOO, PPO and GOLD, with their scripts), and the rule of each."""

from __future__ import annotations

from rlkit_convert import trl_gold
from rlkit_convert.conversion import (
    COMBINED,
    ByHand,
    Equivalent,
    NoEquivalent,
    Rule,
    boolean,
    choice,
    integer,
    number,
    text,
)
from rlkit_convert.script import read_script
from rlkit_convert.shell import commands
from rlkit_convert.source import PeerOptions, read_yaml

TRAINER = "the trainer"
"""The key under which the trainer of the options is kept: grpo, rloo, ppo or gold."""
TRAINERS = ("grpo", "rloo", "ppo", "gold")

ENGINE = "an argument of the engine, which belongs in rollout.engine.launch.args"
MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory (default: auto), and the gradient is the same"
HUB = "rlkit export writes a Hugging Face folder for `hf upload`"
QUANTISED = "model.quantization: nf4, with double quantization, is the only type; it computes in model.dtype"
ROLLOUTS = "nothing to do: rollouts are saved in the run folder; log.rollouts"
TOOLS = "see rlkit docs tools-and-environments"
ROUTER = "output_router_logits: train.router_aux_loss_coef above 0 requests them"
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
    "gold": trl_gold.DEFAULTS,
    "ppo": {
        "kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "response_length": 53,
        "temperature": 0.7, "num_ppo_epochs": 4, "num_mini_batches": 1, "learning_rate": 5e-5,
    },
}  # fmt: skip
"""TRL's defaults that differ from rlkit's, for all trainers and for each."""

HINTS = {
    "rloo": {"normalize_advantages", "rloo_k", "reward_clip_range"},
    "gold": trl_gold.HINTS,
    "ppo": {"kl_coef", "vf_coef", "cliprange", "cliprange_value", "num_ppo_epochs", "reward_model_path"},
}
"""Options that only one trainer has."""


def steps_between(value: object) -> int:
    """Return an interval in steps.

    Raises:
        ValueError: The interval is a fraction of all steps.
    """
    if 0 < number(value) < 1:
        raise ValueError("expected a number of steps")
    return integer(value)


def paths(value: object) -> str | list[str]:
    """Return a path, or several.

    Raises:
        ValueError: The value is a mapping.
    """
    return [text(path) for path in value] if isinstance(value, list) else text(value)


GROUPED = {
    "optim_args optim_target_modules": "options of train.optimizer",
    "average_tokens_across_devices": "nothing to do: tokens are counted over all ranks",
    "bf16_full_eval fp16_full_eval": "nothing to do: validation computes in fabric.precision, as training does",
    "tf32": "rlkit does not use TF32; fabric.precision: bf16-mixed is faster",
    "activation_checkpointing activation_checkpointing_kwargs": "train.checkpoint_activations",
    "torch_compile* liger_kernel_config use_cache torch_empty_cache_steps": "nothing to do: does not affect learning",
    "auto_find_batch_size": MICRO,
    "include_* disable_tqdm skip_memory_metrics debug": "nothing to do: all metrics are in metrics.jsonl",
    "trackio_*": "write a logger: rlkit plugins new NAME --kind logger",
    "eval_* batch_eval_metrics prediction_loss_only label_names": "see the section `validation:`",
    "save_on_each_node": "nothing to do: all nodes share the run folder",
    "enable_jit_checkpoint": "nothing to do: a signal saves a checkpoint",
    "load_best_model_at_end metric_for_best_model greater_is_better": "save.keep_best: best by a metric",
    "ignore_data_skip restore_callback_states_from_checkpoint": "nothing to do: a resumed run continues exactly",
    "full_determinism data_seed": "nothing to do: train.seed determines the order of prompts and every sample",
    "use_cpu": "fabric.accelerator: cpu",
    "accelerator_config parallelism_config local_rank": "where a run takes place is set in the section `fabric:`",
    "train_sampling_strategy length_column_name": "nothing to do: groups are divided among ranks by their length",
    "do_train do_eval do_predict": "nothing to do: rlkit fit trains, rlkit validate validates",
    "transformers_* ignore_bias_buffers": "nothing to do",
}
"""Remedies for groups of options, including those of transformers' trainer."""

RULES: dict[str, Rule] = {
    TRAINER: COMBINED,
    **trl_gold.RULES,
    "model_name_or_path": Equivalent("model.path", text),
    "sft_model_path": Equivalent("model.path", text),
    "trust_remote_code": Equivalent("model.trust_remote_code", boolean),
    "attn_implementation": Equivalent(
        "model.attention", choice({n: n for n in ("sdpa", "eager", "flash_attention_2", "flash_attention_3")})
    ),
    "dtype": COMBINED,
    "torch_dtype": COMBINED,
    "use_peft": COMBINED,
    "lora_*": COMBINED,
    "use_rslora": COMBINED,
    "use_dora": COMBINED,
    "load_in_4bit": Equivalent("model.quantization", lambda value: "nf4" if boolean(value) else None),
    "load_in_*": ByHand(QUANTISED),
    "bnb_*": NoEquivalent(QUANTISED),
    "use_bnb_*": NoEquivalent(QUANTISED),
    "model_revision": ByHand("download that revision and set model.path to its folder", ("main",)),
    "model_init_kwargs": ByHand(f"model.dtype, model.attention and model.config; {ROUTER}"),
    "chat_template_kwargs": Equivalent("model.chat_template_kwargs"),
    "chat_template_path": ByHand("put the template in the model's folder"),
    "dataset_name": Equivalent("task.path", paths),
    "dataset_validation_files": Equivalent("task.validation_path", paths),
    "dataset_config": Equivalent("task.name", text),
    "dataset_train_split": Equivalent("task.train_split", text),
    "dataset_test_split": Equivalent("task.validation_split", text),
    "dataset_streaming": NoEquivalent("nothing to do: rows are read from tables on disk"),
    "map.prompt": Equivalent("task.prompt_field", text),
    "map.template": Equivalent("task.template", text),
    "map.system": Equivalent("task.system", text),
    "map.answer": Equivalent("task.answer_field", text),
    "map.*": ByHand("save the rows with `to_json`, or let the reward read the column that it is made of"),
    "select": Equivalent("train.max_rows", integer),
    "train_test_split": Equivalent("task.validation_split", number),
    "dataset_map": ByHand("task HFDataset reads columns by name; save the rows that it makes with `to_json`"),
    "label_smoothing_factor": ByHand("an option of loss CrossEntropy only"),
    "neftune_noise_alpha": ByHand("rlkit adds no noise to embeddings"),
    "args": ByHand("give the options of its command line after the file"),
    "optimizers": ByHand("train.optimizer: AdamW, Muon or TorchOptimizer, and train.schedule"),
    "eval_dataset": ByHand("task.validation_path, task.validation_split, or a task of its own under validation.tasks"),
    "processing_class.*": ByHand("save the tokenizer with the model, and set model.path to their folder"),
    "model.*": ByHand("save the model as the script makes it, and set model.path to its folder"),
    "class *": ByHand("a loss, an advantage or a callback of your own: rlkit docs plugins"),
    "callbacks": ByHand("`callbacks:` lists rlkit's; write one with rlkit plugins new NAME --kind callback"),
    "rollout_func": ByHand(TOOLS),
    "environment_factory": ByHand(TOOLS),
    "tools": ByHand(TOOLS),
    "def *": ByHand("copy it, and what it uses, to rewards.py"),
    "[*][*]*": ByHand("give its options after the file"),
    "datasets": ByHand("task Mix mixes several data sets by weight"),
    "reward_funcs": COMBINED,
    "reward_model_name_or_path": COMBINED,
    "reward_model_path": COMBINED,
    "reward_weights": COMBINED,
    "multi_objective_aggregation": COMBINED,
    "value_model_path": COMBINED,
    "max_prompt_length": Equivalent("rollout.max_prompt_tokens", integer),
    "max_completion_length": Equivalent("rollout.sampling.max_tokens", integer),
    "response_length": Equivalent("rollout.sampling.max_tokens", integer),
    "num_generations": COMBINED,
    "rloo_k": COMBINED,
    "temperature": Equivalent("rollout.sampling.temperature", number),
    "top_p": COMBINED,
    "top_k": COMBINED,
    "min_p": COMBINED,
    "repetition_penalty": ByHand("rlkit has none: log-probs would differ from the trainer's", (1.0,)),
    "generation_kwargs": ByHand("see rollout.sampling"),
    "num_generations_eval": NoEquivalent("validation.samples"),
    "use_vllm": COMBINED,
    "vllm_mode": COMBINED,
    "vllm_tensor_parallel_size": COMBINED,
    "vllm_importance_sampling_*": COMBINED,
    "vllm_gpu_memory_utilization": NoEquivalent(
        "rollout.engine.launch.memory_fraction is the fraction of free memory when a server starts (default: 0.4)"
    ),
    "vllm_server_*": NoEquivalent(
        "rollout.engine: VllmServer, with first_gpu, or urls of servers as the package's README starts them"
    ),
    "vllm_enable_sleep_mode": NoEquivalent("rollout.engine.launch.release_memory"),
    "vllm_*": NoEquivalent(ENGINE),
    "per_device_train_batch_size": COMBINED,
    "gradient_accumulation_steps": COMBINED,
    "steps_per_generation": COMBINED,
    "generation_batch_size": COMBINED,
    "num_processes": COMBINED,
    "num_iterations": COMBINED,
    "num_ppo_epochs": COMBINED,
    "num_mini_batches": COMBINED,
    "max_steps": COMBINED,
    "num_train_epochs": COMBINED,
    "total_episodes": COMBINED,
    "learning_rate": Equivalent("train.lr", number),
    "weight_decay": Equivalent("train.weight_decay", number),
    "max_grad_norm": Equivalent("train.max_grad_norm", number),
    "lr_scheduler_type": COMBINED,
    "lr_scheduler_kwargs": ByHand("options of train.schedule"),
    "warmup_ratio": Equivalent("train.warmup_ratio", number),
    "warmup_steps": COMBINED,
    "adam_beta1": COMBINED,
    "adam_beta2": COMBINED,
    "adam_epsilon": Equivalent("train.optimizer.eps", number),
    "optim": COMBINED,
    "seed": Equivalent("train.seed", integer),
    "gradient_checkpointing": Equivalent("train.checkpoint_activations", boolean),
    "gradient_checkpointing_kwargs": NoEquivalent("nothing to do"),
    "bf16": COMBINED,
    "fp16": NoEquivalent("fabric.precision: bf16-mixed"),
    "beta": COMBINED,
    "use_bias_correction_kl": COMBINED,
    "kl_coef": COMBINED,
    "kl_estimator": COMBINED,
    "epsilon": COMBINED,
    "epsilon_high": COMBINED,
    "delta": COMBINED,
    "sapo_temperature_*": COMBINED,
    "vespo_*": COMBINED,
    "cliprange": COMBINED,
    "cliprange_value": COMBINED,
    "vf_coef": NoEquivalent("nothing to do: the critic has its own optimizer; critic.lr"),
    "gamma": COMBINED,
    "lam": COMBINED,
    "whiten_rewards": ByHand("shaping.normalize divides by the running standard deviation"),
    "missing_eos_penalty": ByHand("reward Overlong falls as completions approach the limit"),
    "stop_token*": NoEquivalent(
        "nothing to do: the model's own end tokens are used; rollout.sampling.stop_ids adds more"
    ),
    "loss_type": COMBINED,
    "importance_sampling_level": COMBINED,
    "scale_rewards": COMBINED,
    "normalize_advantages": COMBINED,
    "reward_clip_range": COMBINED,
    "mask_truncated_completions": Equivalent("train.mask_truncated", boolean),
    "sync_ref_model": COMBINED,
    "ref_model_*": COMBINED,
    "top_entropy_quantile": ByHand("rlkit trains on all tokens; losses ClipCov and KLCov select tokens", (1.0,)),
    "entropy_coef": Equivalent("train.entropy_coef", number),
    "use_adaptive_entropy": ByHand(ENTROPY),
    "entropy_*": NoEquivalent(ENTROPY),
    "off_policy_mask_threshold": Equivalent("train.off_policy_mask_threshold", number),
    "max_tool_calling_iterations": ByHand("conversation.turns, beside `tools:`"),
    "report_to": COMBINED,
    "run_name": COMBINED,
    "project": COMBINED,
    "output_dir": NoEquivalent("rlkit fit --out FOLDER"),
    "overwrite_output_dir": NoEquivalent("rlkit fit --out FOLDER, a new one for each run"),
    "logging_steps": NoEquivalent("nothing to do: every step is logged"),
    "logging_*": NoEquivalent("nothing to do: every step is logged"),
    "log_*": NoEquivalent(ROLLOUTS),
    "num_completions_to_print": NoEquivalent(ROLLOUTS),
    "save_steps": COMBINED,
    "save_only_model": Equivalent("save.optimizer", lambda value: not boolean(value)),
    "save_total_limit": Equivalent("save.keep_last", integer),
    "save_strategy": COMBINED,
    "eval_strategy": COMBINED,
    "eval_steps": COMBINED,
    "eval_on_start": Equivalent("validation.before", boolean),
    "per_device_eval_batch_size": NoEquivalent("nothing to do: all validation prompts are sampled together"),
    "resume_from_checkpoint": NoEquivalent("rlkit fit --resume RUN, or --resume auto with --out"),
    "push_to_hub": NoEquivalent(HUB),
    "hub_*": NoEquivalent(HUB),
    "config_file": NoEquivalent("accelerate's file says where a run takes place: the section `fabric:`"),
    "accelerate_config": NoEquivalent("where a run takes place is set in the section `fabric:`"),
    "config": ByHand("its file sets more options; convert that file, with the other options after it"),
    "deepspeed": NoEquivalent("fabric.strategy: fsdp2 shards over all ranks"),
    "fsdp*": NoEquivalent("fabric.strategy: fsdp2 shards over all ranks"),
    "ds3_gather_for_generation": NoEquivalent("nothing to do: rlkit runs without DeepSpeed"),
    "ddp_*": NoEquivalent("fabric.strategy"),
    "num_machines": Equivalent("fabric.num_nodes", integer),
    "mixed_precision": NoEquivalent("fabric.precision"),
    "use_liger*": NoEquivalent("nothing to do: log-probs are computed in slices without it"),
    "shuffle_dataset": ByHand("rlkit shuffles; curriculum Difficulty orders rows by a column", (True,)),
    "remove_unused_columns": NoEquivalent("nothing to do: all columns are kept for the reward"),
    "disable_dropout": NoEquivalent("nothing to do: log-probs are always computed without dropout"),
    "dataloader_*": NoEquivalent("nothing to do: rows are read in the run's process"),
    "local_rollout_forward_batch_size": NoEquivalent(MICRO),
    "cache_implementation": NoEquivalent("nothing to do: TorchEngine has its own cache"),
    "use_transformers_*": NoEquivalent("nothing to do: TorchEngine samples continuously"),
    "cast_lm_head_to_fp32": NoEquivalent("nothing to do: log-probs are computed in float32"),
    "router_aux_loss_coef": Equivalent("train.router_aux_loss_coef", number),
    "output_router_logits": NoEquivalent(ROUTER),
    "pad_to_multiple_of": NoEquivalent("nothing to do"),
    **{name: NoEquivalent(remedy) for names, remedy in GROUPED.items() for name in names.split()},
}


def defaults(options: PeerOptions) -> dict[str, object]:
    """Return TRL's defaults for the trainer of the options."""
    own = OWN_DEFAULTS[str(options.values[TRAINER])]
    merged = {**ALL_DEFAULTS, **own}
    if "response_length" in own:
        del merged["max_completion_length"]
    return merged


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of a YAML file, of a Python script or of the command in a shell script; then the overrides."""
    words: list[str] = []
    trainer = ""
    if name.lower().endswith((".yaml", ".yml")):
        options = read_yaml(content, name, nested=False)
    elif name.lower().endswith(".py"):
        options, trainer = read_script(content, name)
        if overrides:  # the options of the command line
            options.unresolved.pop("args", None)
    else:
        options = PeerOptions()
        words = next((command for command in commands(content, name) if _has_flag(command)), [])
    _add_flags(options, [*words, *overrides])
    if options.values or options.unresolved:
        options.values[TRAINER] = trainer or _trainer(options, words)
    return options


def _trainer(options: PeerOptions, words: list[str]) -> str:
    """Return the trainer that a command names, or else the one that the options imply."""
    for trainer in TRAINERS:
        if any(trainer in _script(word) for word in words):
            return trainer
    return next((trainer for trainer, names in HINTS.items() if names & options.values.keys()), "grpo")


def _has_flag(words: list[str]) -> bool:
    return any(word.startswith("--") for word in words)


def _script(word: str) -> str:
    """Return a word that may name a trainer: a verb of `trl`, or a Python file; empty for any other word."""
    return word if word in TRAINERS or word.endswith(".py") else ""


def _add_flags(options: PeerOptions, words: list[str]) -> None:
    """Add `--option value`, `--option=value`, `--option` alone (true) and `--option a b` (a list)."""
    key = ""
    values: list[str] = []
    has_value = False
    for word in [*words, "--"]:
        if word.startswith("--") or word.endswith(".py") or (word in TRAINERS and (values or not key)):
            if key and len(values) < 2:
                options.add(key, values[0] if values else "true")
            elif key:
                options.values[key] = values
            name, equals, value = word.removeprefix("--").partition("=")
            key = name.replace("-", "_") if word.startswith("--") else ""
            values = [value] if equals else []
            has_value = bool(equals)
        elif key and not has_value:
            values.append(word)
