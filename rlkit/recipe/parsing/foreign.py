"""Names of options in TRL, verl and OpenRLHF, which their users may type."""

from __future__ import annotations

NAMES = {
    "--out": "output_dir",
    "--resume": "resume_from_checkpoint",
    "advantage": "adv_estimator",
    "advantage.scale_by_std": "scale_rewards",
    "conversation.turns": "max_assistant_turns max_turns",
    "conversation.user_turns": "max_user_turns",
    "critic.clip": "cliprange_value",
    "critic.lr": "critic_learning_rate",
    "fabric.devices": "gpus n_gpus_per_node",
    "fabric.num_nodes": "nnodes",
    "fabric.precision": "bf16",
    "fabric.strategy": "deepspeed fsdp",
    "kl_loss": "use_kl_loss",
    "kl_loss.coef": "beta kl_loss_coef",
    "kl_loss.estimator": "kl_loss_type",
    "kl_reward": "use_kl_in_reward",
    "kl_reward.coef": "init_kl_coef kl_coef",
    "log.loggers": "report_to",
    "loss": "importance_sampling_level loss_mode",
    "loss.clip_dual": "clip_ratio_c delta",
    "loss.clip_high": "clip_ratio_high epsilon_high",
    "loss.clip_low": "clip_ratio clip_ratio_low cliprange eps_clip epsilon",
    "model.attention": "attn_implementation",
    "model.dtype": "torch_dtype",
    "model.lora": "use_peft",
    "model.lora.alpha": "lora_alpha",
    "model.lora.rank": "lora_r lora_rank",
    "model.lora.targets": "lora_target_modules",
    "model.lora.use_dora": "use_dora",
    "model.lora.use_rslora": "use_rslora",
    "model.path": "model_name_or_path pretrain",
    "reference": "sync_ref_model",
    "reward": "reward_funcs",
    "reward.path": "reward_model_path",
    "rollout.engine": "use_vllm",
    "rollout.engine.launch.memory_fraction": "gpu_memory_utilization",
    "rollout.engine.launch.tensor_parallel": "tensor_model_parallel_size",
    "rollout.filter": "filter_groups",
    "rollout.group_size": "n n_samples_per_prompt num_generations",
    "rollout.max_prompt_tokens": "max_prompt_length prompt_max_len",
    "rollout.overlong": "filter_overlong_prompts",
    "rollout.sampling.max_tokens": "generate_max_len max_completion_length max_new_tokens max_response_length "
    "response_length",
    "save.every": "save_freq save_steps",
    "save.keep_last": "save_total_limit",
    "task.path": "dataset_name prompt_data train_files",
    "task.validation_path": "val_files",
    "train.aggregation": "loss_agg_mode loss_type",
    "train.checkpoint_activations": "enable_gradient_checkpointing gradient_checkpointing",
    "train.data_epochs": "num_train_epochs total_epochs",
    "train.entropy_coef": "entropy_coeff",
    "train.epochs": "num_iterations num_ppo_epochs ppo_epochs",
    "train.lr": "actor_learning_rate learning_rate",
    "train.mask_truncated": "mask_truncated_completions",
    "train.max_grad_norm": "grad_clip max_grad_norm",
    "train.max_rows": "train_max_samples",
    "train.max_tokens_per_micro_batch": "gradient_accumulation_steps ppo_micro_batch_size ppo_micro_batch_size_per_gpu",
    "train.minibatches": "ppo_mini_batch_size steps_per_generation",
    "train.offload_activations": "activation_offloading enable_activation_offload",
    "train.offload_during_rollout": "param_offload",
    "train.optimizer": "optim",
    "train.prompts_per_step": "batch_size per_device_train_batch_size rollout_batch_size train_batch_size",
    "train.schedule": "lr_scheduler_type",
    "train.steps": "max_steps total_training_steps",
    "validation.every": "eval_steps test_freq",
}
"""The names that other toolkits have for each option of rlkit, or of a verb."""

FOREIGN = {name: option for option, names in NAMES.items() for name in names.split()}
"""The rlkit option, or the verb's, for each name."""
NO_OPTION = {
    "logging_steps": "every step is logged; remove it",
    "wandb": "--log.loggers='[{class_path: Wandb, init_args: {project: NAME}}]' logs to Weights & Biases",
}
"""Names that are no option of rlkit's, and what to do instead."""

JSONARGPARSE = {
    "--config": "write --recipe FILE, several times to stack recipes",
    "--print_config": "`rlkit recipe show RECIPE` prints a recipe with every option filled in",
}
"""Options of command lines that jsonargparse makes, and what does the same here."""
