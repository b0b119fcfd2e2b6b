"""TRL's options, with those of its scripts, and the rule of each."""

from __future__ import annotations

from rlkit.base.errors import RecipeError, show
from rlkit_convert import trl_distillation, trl_recorded
from rlkit_convert.rules import COMBINED, ByHand, Equivalent, Rule, equivalents, read_together, without_equivalent
from rlkit_convert.script import read_script
from rlkit_convert.shell import commands
from rlkit_convert.source import PeerOptions, read_yaml
from rlkit_convert.trl_trainer import (
    ALIASES,
    DISTILLED,
    OTHERS,
    RECORDED,
    SAMPLING,
    TRAINER,
    TRAINERS,
    find_trainer,
    refuse,
)
from rlkit_convert.values import boolean, choice, integer, number, text

MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory (default: auto), and the gradient is the same"
QUANTISED = "model.quantization: nf4, with double quantization, is the only type; it computes in model.dtype"
TOOLS = "see rlkit docs tools-and-environments"
ROUTER = "output_router_logits: train.router_aux_loss_coef above 0 requests them"
ASSUMED = (
    "assumed, since no option belongs to one trainer alone; for another: rlkit convert --from trl FILE sft, or dpo"
)
ENTROPY = "train.entropy_coef is constant"

ALL_DEFAULTS: dict[str, object] = {
    "per_device_train_batch_size": 8, "learning_rate": 1e-6, "lr_scheduler_type": "linear",
    "max_completion_length": 512, "gradient_checkpointing": True, "eval_strategy": "no", "save_steps": 500,
}  # fmt: skip
OWN_DEFAULTS: dict[str, dict[str, object]] = {
    "grpo": {"num_generations": 8, "beta": 0.0, "loss_type": "dapo", "scale_rewards": "group"},
    "rloo": {"num_generations": 2, "beta": 0.05},
    "online_dpo": {"beta": 0.1, "max_new_tokens": 64, "temperature": 0.9, "learning_rate": 5e-7},
    **trl_distillation.DEFAULTS,
    **trl_recorded.DEFAULTS,
    "ppo": {
        "kl_coef": 0.05, "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95, "response_length": 53,
        "temperature": 0.7, "num_ppo_epochs": 4, "num_mini_batches": 1, "learning_rate": 5e-5,
    },
}  # fmt: skip
"""TRL's defaults that differ from rlkit's, for all trainers and for each."""


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


REMEDIES = {
    "bnb_* use_bnb_*": QUANTISED,
    "dataset_streaming": "nothing to do: rows are read from tables on disk",
    "num_generations_eval": "validation.samples",
    "vllm_gpu_memory_utilization": "rollout.engine.launch.memory_fraction is the fraction of free memory when a server "
    "starts (default: 0.4)",
    "vllm_server_*": "rollout.engine: VllmServer, with first_gpu, or urls of servers as the package's README starts "
    "them",
    "vllm_enable_sleep_mode": "rollout.engine.launch.release_memory",
    "vllm_*": "an argument of the engine, which belongs in rollout.engine.launch.args",
    "fp16": "fabric.precision: bf16-mixed",
    "vf_coef": "nothing to do: the critic has its own optimizer; critic.lr",
    "stop_token*": "nothing to do: the model's own end tokens are used; rollout.sampling.stop_ids adds more",
    "entropy_*": ENTROPY,
    "output_dir": "rlkit fit --out FOLDER",
    "overwrite_output_dir": "rlkit fit --out FOLDER, a new one for each run",
    "logging_*": "nothing to do: every step is logged",
    "log_* num_completions_to_print": "nothing to do: rollouts are saved in the run folder; log.rollouts",
    "per_device_eval_batch_size": "nothing to do: all validation prompts are sampled together",
    "resume_from_checkpoint": "rlkit fit --resume RUN, or --resume auto with --out",
    "push_to_hub hub_*": "rlkit export writes a Hugging Face folder for `hf upload`",
    "config_file": "accelerate's file says where a run takes place: the section `fabric:`",
    "accelerate_config accelerator_config parallelism_config local_rank": "where a run takes place is set in the "
    "section `fabric:`",
    "deepspeed fsdp*": "fabric.strategy: fsdp2 shards over all ranks",
    "ds3_gather_for_generation": "nothing to do: rlkit runs without DeepSpeed",
    "ddp_*": "fabric.strategy",
    "mixed_precision": "fabric.precision",
    "use_liger*": "nothing to do: log-probs are computed in slices without it",
    "remove_unused_columns": "nothing to do: all columns are kept for the reward",
    "disable_dropout": "nothing to do: log-probs are always computed without dropout",
    "dataloader_*": "nothing to do: rows are read in the run's process",
    "auto_find_batch_size local_rollout_forward_batch_size": MICRO,
    "cache_implementation": "nothing to do: TorchEngine has its own cache",
    "use_transformers_*": "nothing to do: TorchEngine samples continuously",
    "cast_lm_head_to_fp32": "nothing to do: log-probs are computed in float32",
    "output_router_logits": ROUTER,
    "optim_args optim_target_modules": "options of train.optimizer",
    "average_tokens_across_devices": "nothing to do: tokens are counted over all ranks",
    "bf16_full_eval fp16_full_eval": "nothing to do: validation computes in fabric.precision, as training does",
    "tf32": "rlkit does not use TF32; fabric.precision: bf16-mixed is faster",
    "torch_compile* liger_kernel_config use_cache torch_empty_cache_steps": "nothing to do: does not affect learning",
    "include_* disable_tqdm skip_memory_metrics debug": "nothing to do: all metrics are in metrics.jsonl",
    "trackio_*": "log.loggers: Trackio has space_id",
    "eval_* batch_eval_metrics prediction_loss_only label_names": "see the section `validation:`",
    "save_on_each_node": "nothing to do: all nodes share the run folder",
    "enable_jit_checkpoint": "nothing to do: a signal saves a checkpoint",
    "load_best_model_at_end metric_for_best_model greater_is_better": "save.keep_best: best by a metric",
    "ignore_data_skip restore_callback_states_from_checkpoint": "nothing to do: a resumed run continues exactly",
    "full_determinism data_seed": "nothing to do: train.seed determines the order of prompts and every sample",
    "use_cpu": "fabric.accelerator: cpu",
    "train_sampling_strategy length_column_name": "nothing to do: groups are divided among ranks by their length",
    "do_train do_eval do_predict": "nothing to do: rlkit fit trains, rlkit validate validates",
    "transformers_* ignore_bias_buffers pad_to_multiple_of": "nothing to do",
    "gradient_checkpointing_kwargs activation_checkpointing_kwargs": "nothing to do",
}  # fmt: skip
"""Remedies for options without an equivalent, including those of transformers' trainer."""

RULES: dict[str, Rule] = {
    **read_together({
        "": "dtype torch_dtype use_peft lora_* use_rslora use_dora reward_funcs reward_model_name_or_path "
        "reward_model_path reward_weights multi_objective_aggregation value_model_path num_generations rloo_k top_p "
        "top_k min_p use_vllm vllm_mode vllm_tensor_parallel_size vllm_importance_sampling_* "
        "per_device_train_batch_size gradient_accumulation_steps steps_per_generation generation_batch_size "
        "num_processes num_iterations num_ppo_epochs num_mini_batches max_steps num_train_epochs total_episodes "
        "lr_scheduler_type warmup_steps adam_beta1 adam_beta2 optim bf16 beta use_bias_correction_kl kl_coef "
        "kl_estimator epsilon epsilon_high delta sapo_temperature_* vespo_* cliprange cliprange_value gamma lam "
        "loss_type importance_sampling_level scale_rewards normalize_advantages reward_clip_range sync_ref_model "
        "ref_model ref_model_* report_to run_name project save_steps save_strategy eval_strategy eval_steps",
    }),
    **equivalents(text, {
        "model_name_or_path": "model.path", "sft_model_path": "model.path", "dataset_config": "task.name",
        "dataset_train_split": "task.train_split", "dataset_test_split": "task.validation_split",
        "map.prompt": "task.prompt_field", "map.template": "task.template", "map.system": "task.system",
        "map.answer": "task.answer_field",
    }),
    **equivalents(boolean, {
        "trust_remote_code": "model.trust_remote_code", "gradient_checkpointing": "train.checkpoint_activations",
        "activation_checkpointing": "train.checkpoint_activations",
        "mask_truncated_completions": "train.mask_truncated", "eval_on_start": "validation.before",
    }),
    **equivalents(integer, {
        "select": "train.max_rows", "max_prompt_length": "rollout.max_prompt_tokens",
        "max_completion_length": "rollout.sampling.max_tokens", "response_length": "rollout.sampling.max_tokens",
        "max_new_tokens": "rollout.sampling.max_tokens",
        "seed": "train.seed", "save_total_limit": "save.keep_last", "num_machines": "fabric.num_nodes",
    }),
    **equivalents(number, {
        "train_test_split": "task.validation_split", "temperature": "rollout.sampling.temperature",
        "learning_rate": "train.lr", "weight_decay": "train.weight_decay", "max_grad_norm": "train.max_grad_norm",
        "warmup_ratio": "train.warmup_ratio", "adam_epsilon": "train.optimizer.eps",
        "entropy_coef": "train.entropy_coef", "off_policy_mask_threshold": "train.off_policy_mask_threshold",
        "router_aux_loss_coef": "train.router_aux_loss_coef",
    }),
    TRAINER: COMBINED,
    **trl_distillation.RULES,
    "attn_implementation": Equivalent(
        "model.attention", choice({n: n for n in ("sdpa", "eager", "flash_attention_2", "flash_attention_3")})
    ),
    "load_in_4bit": Equivalent("model.quantization", lambda value: "nf4" if boolean(value) else None),
    "load_in_*": ByHand(QUANTISED),
    "model_revision": ByHand("download that revision and set model.path to its folder", ("main",)),
    "model_init_kwargs": ByHand(f"model.dtype, model.attention and model.config; {ROUTER}"),
    "chat_template_kwargs": Equivalent("model.chat_template_kwargs"),
    "chat_template_path": ByHand("put the template in the model's folder"),
    **equivalents(paths, {"dataset_name": "task.path", "dataset_validation_files": "task.validation_path"}),
    "map.*": ByHand("save the rows with `to_json`, or let the reward read the column that it is made of"),
    "dataset_map": ByHand("task HFDataset reads columns by name; save the rows that it makes with `to_json`"),
    "label_smoothing_factor": ByHand("an option of loss CrossEntropy only: label_smoothing"),
    "neftune_noise_alpha": ByHand("an option of loss CrossEntropy only: neftune_alpha"),
    "*Trainer": ByHand("a run of its own, which its name after the file chooses: rlkit convert --from trl FILE sft"),
    "args": ByHand("give the options of its command line after the file"),
    "optimizers": ByHand("train.optimizer: AdamW, AdamW8bit, Muon or TorchOptimizer, and train.schedule"),
    "eval_dataset": ByHand("task.validation_path, task.validation_split, or a task of its own under validation.tasks"),
    "processing_class.*": ByHand("save the tokenizer with the model, and set model.path to their folder"),
    "model.*": ByHand("save the model as the script makes it, and set model.path to its folder"),
    "class *": ByHand("a loss, an advantage or a callback of your own: rlkit docs plugins"),
    "callbacks": ByHand("`callbacks:` lists rlkit's; write one with rlkit plugins new NAME --kind callback"),
    **dict.fromkeys(("rollout_func", "environment_factory", "tools"), ByHand(TOOLS)),
    "def *": ByHand("copy it, and what it uses, to rewards.py"),
    "[*][*]*": ByHand("give its options after the file"),
    "datasets": ByHand("task Mix mixes several data sets by weight"),
    "repetition_penalty": ByHand("rlkit has none: log-probs would differ from the trainer's", (1.0,)),
    "generation_kwargs": ByHand("see rollout.sampling"),
    "lr_scheduler_kwargs": ByHand("options of train.schedule"),
    "whiten_rewards": ByHand("shaping.normalize divides by the running standard deviation"),
    "max_length": ByHand("rollout.max_prompt_tokens, with rollout.overlong: left or drop"),
    "judge": ByHand("a judge as the reward: rlkit docs judges"),
    "missing_eos_penalty": ByHand("reward Overlong falls as completions approach the limit"),
    "top_entropy_quantile": ByHand("rlkit trains on all tokens; losses ClipCov and KLCov select tokens", (1.0,)),
    "use_adaptive_entropy": ByHand(ENTROPY),
    "max_tool_calling_iterations": ByHand("conversation.turns, beside `tools:`"),
    "save_only_model": Equivalent("save.optimizer", lambda value: not boolean(value)),
    "config": ByHand("its file sets more options; convert that file, with the other options after it"),
    "shuffle_dataset": ByHand("rlkit shuffles; curriculum Difficulty orders rows by a column", (True,)),
    **without_equivalent(REMEDIES),
}  # fmt: skip


def rules(options: PeerOptions) -> dict[str, Rule]:
    """Return the rules for the trainer of the options."""
    trainer = options.values[TRAINER]
    own = trl_recorded.RULES if trainer in RECORDED else trl_distillation.DATA_RULES if trainer in DISTILLED else {}
    return {**RULES, **own}


def defaults(options: PeerOptions) -> dict[str, object]:
    """Return TRL's defaults for the trainer of the options."""
    own = OWN_DEFAULTS[str(options.values[TRAINER])]
    merged = {**ALL_DEFAULTS, **own}
    if {"response_length", "max_new_tokens"} & own.keys():
        del merged["max_completion_length"]
    return merged


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of a YAML file, of a Python script or of the command in a shell script; then the overrides.

    Raises:
        RecipeError: They are of a trainer that is not converted, or the overrides begin with a word that names none.
    """
    words: list[str] = []
    trainer = overrides.pop(0) if overrides and not overrides[0].startswith("--") else ""
    trainer = ALIASES.get(trainer, trainer)
    if trainer and trainer not in (*TRAINERS, *OTHERS):
        raise RecipeError(
            f"{show(trainer, 60)} is neither an option of trl nor one of its trainers, expected `--option value` or "
            f"{', '.join(TRAINERS)}; `> mine.yaml` writes the recipe to a file"
        )
    if trainer in OTHERS:
        refuse(name, trainer)
    if name.lower().endswith((".yaml", ".yml")):
        options = read_yaml(content, name, nested=False)
    elif name.lower().endswith(".py"):
        options, named = read_script(content, name, trainer)
        trainer = named or trainer
        if overrides:  # the options of the command line
            options.unresolved.pop("args", None)
    else:
        options = PeerOptions()
        words = next((words for words in commands(content, name) if _has_options(words)), [])
    _add_flags(options, [*words, *overrides])
    if options.values or options.unresolved:
        trainer = trainer or find_trainer(options.values, words, name)
        if trainer in OTHERS:
            refuse(name, trainer)
        if trainer == "cpo" and "loss_type" not in options.unresolved:
            trl_recorded.require_simpo(name, options.values.get("loss_type"))
        options.values[TRAINER] = trainer or "grpo"
        if not trainer:
            options.remarks[TRAINER] = ASSUMED
    return options


def _has_options(words: list[str]) -> bool:
    return "vllm-serve" not in words and any(word.startswith("--") for word in words)


def _add_flags(options: PeerOptions, words: list[str]) -> None:
    """Add `--option value`, `--option=value`, `--option` (true), `--no_option` (false) and `--option a b` (a list)."""
    key = ""
    values: list[str] = []
    has_value = False
    for word in [*words, "--"]:
        if word.startswith("--") or word.endswith(".py") or (word in SAMPLING and (values or not key)):
            if key and not values and key.startswith("no_"):
                options.add(key.removeprefix("no_"), "false")
            elif key and len(values) < 2:
                options.add(key, values[0] if values else "true")
            elif key:
                options.values[key] = values
            name, equals, value = word.removeprefix("--").partition("=")
            key = name.replace("-", "_") if word.startswith("--") else ""
            values = [value] if equals else []
            has_value = bool(equals)
        elif key and not has_value:
            values.append(word)
