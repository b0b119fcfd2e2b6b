"""Options of the configurations that verl generates for FSDP and Megatron, beside those of `peer_examples`."""

from __future__ import annotations

VERL_GENERATED = {
    "actor_rollout_ref.actor.": (
        "calculate_entropy calculate_sum_pi_squared data_loader_seed freeze_vision_tower load_weight pad_to_length "
        "rollout_n sum_pi_squared_checkpointing use_prefix_grouper "
    ),
    "actor_rollout_ref.actor.qat.": "activation_observer enable group_size ignore_patterns mode",
    "actor_rollout_ref.actor.router_replay.": "mode",
    "actor_rollout_ref.model.lora.": (
        "a2a_experimental alpha dropout dropout_position exclude_modules freeze_language_model freeze_vision_model "
        "freeze_vision_projection lora_A_init_method lora_B_init_method merge rank target_modules type "
    ),
    "actor_rollout_ref.model.mtp.": (
        "detach_encoder enable enable_rollout enable_train method mtp_loss_scaling_factor num_speculative_tokens "
        "speculative_algorithm speculative_eagle_topk speculative_num_draft_tokens speculative_num_steps "
    ),
    "actor_rollout_ref.model.tiled_mlp.": "enabled num_shards",
    "actor_rollout_ref.ref.": "load_weight pad_to_length rollout_n",
    "actor_rollout_ref.ref.router_replay.": "mode",
    "actor_rollout_ref.rollout.checkpoint_engine.": "backend update_weights_bucket_megabytes",
    "actor_rollout_ref.rollout.": (
        "data_parallel_size enable_prefix_caching enable_rollout_routing_replay expert_parallel_size "
        "full_determinism logprobs_mode moe_load_balance_metrics_interval n_gpus_per_node nnodes "
        "pipeline_model_parallel_size qat scheduling_policy seed "
    ),
    "actor_rollout_ref.rollout.disaggregation.": "decode_replicas enabled prefill_replicas transfer_backend",
    "actor_rollout_ref.rollout.layer_name_map.": "gate_proj_layer_name qkv_layer_name",
    "actor_rollout_ref.rollout.prometheus.": "enable file port served_model_name",
    "critic.": "data_loader_seed load_weight nccl_timeout",
    "critic.fsdp.": (
        "dtype entropy_checkpointing entropy_from_logits_chunk_size entropy_from_logits_with_chunking forward_only "
        "forward_prefetch fsdp_size full_determinism model_dtype offload_policy optimizer_offload pad_to_length "
        "pad_to_length_bucket param_offload reshard_after_forward seed strategy ulysses_sequence_parallel_size "
        "use_orig_params use_torch_compile "
    ),
    "critic.fsdp.qat.": "activation_observer enable group_size ignore_patterns mode",
    "critic.fsdp.turbo_config.distributed.": (
        "expert_fully_shard_parallel_size expert_parallel_size fully_shard_parallel_size tensor_parallel_size "
        "ulysses_parallel_size "
    ),
    "critic.fsdp.turbo_config.distributed.fsdp_plan.": (
        "fsdp_implementation num_to_backward_prefetch num_to_forward_prefetch output_dtype param_dtype reduce_dtype "
    ),
    "critic.fsdp.wrap_policy.": "min_num_params",
    "critic.megatron.": (
        "context_parallel_size dist_checkpointing_prefix dist_ckpt_optim_fully_reshardable "
        "distrib_optim_fully_reshardable_mem_efficient dtype dynamic_context_parallel "
        "entropy_from_logits_chunk_size entropy_from_logits_with_chunking expert_model_parallel_size forward_only "
        "grad_offload optimizer_offload pad_bshd_to_minibatch_max pad_to_length pad_to_length_bucket param_offload "
        "pipeline_model_parallel_size seed sequence_parallel tensor_model_parallel_size use_dist_checkpointing "
        "use_distributed_optimizer use_mbridge use_megatron_fsdp use_remove_padding vanilla_mbridge "
    ),
    "critic.megatron.override_transformer_config.": "attention_backend recompute_modules",
    "critic.megatron.qat.": "enable group_size ignore_patterns mode",
    "critic.megatron.router_replay.": "mode",
    "critic.model.fused_kernel_options.": "impl_backend",
    "critic.model.lora.": (
        "a2a_experimental alpha dropout dropout_position exclude_modules freeze_language_model freeze_vision_model "
        "freeze_vision_projection lora_A_init_method lora_B_init_method merge rank target_modules type "
    ),
    "critic.model.mtp.": (
        "detach_encoder enable enable_rollout enable_train method mtp_loss_scaling_factor num_speculative_tokens "
        "speculative_algorithm speculative_eagle_topk speculative_num_draft_tokens speculative_num_steps "
    ),
    "critic.model.tiled_mlp.": "enabled num_shards",
    "critic.model.": "use_fused_kernels use_liger",
    "data.": "audio_key image_patch_size val_max_samples",
    "distillation.distillation_loss.": (
        "clip_ratio clip_ratio_high clip_ratio_low distillation_loss_coef loss_mode policy_loss_mode topk "
        "use_policy_gradient use_task_rewards "
    ),
    "distillation.": "enabled n_gpus_per_node nnodes teacher_key",
    "distillation.teacher_models.teacher_model.inference.": (
        "data_parallel_size disable_log_stats dtype enable_chunked_prefill enable_prefix_caching enforce_eager "
        "expert_parallel_size free_cache_engine gpu_memory_utilization load_format max_num_batched_tokens "
        "max_num_seqs prompt_length response_length skip_tokenizer_init temperature tensor_model_parallel_size "
    ),
    "distillation.teacher_models.teacher_model.": "num_replicas",
    "reward.custom_reward_function.": "name",
    "reward.": "num_workers",
    "reward.reward_manager.module.": "name",
    "reward.reward_manager.": "name source",
    "reward.reward_model.": "enable enable_resource_pool n_gpus_per_node nnodes",
    "reward.reward_model.rollout.": (
        "data_parallel_size disable_log_stats do_sample dtype enable_chunked_prefill enable_prefix_caching "
        "enforce_eager expert_parallel_size free_cache_engine full_determinism gpu_memory_utilization ignore_eos "
        "layered_summon load_format max_num_batched_tokens max_num_seqs multi_stage_wake_up n "
        "pipeline_model_parallel_size prompt_length response_length scheduling_policy seed skip_tokenizer_init "
        "temperature tensor_model_parallel_size top_k top_p "
    ),
    "reward.reward_model.rollout.disaggregation.": "decode_replicas enabled prefill_replicas transfer_backend",
    "reward_manager.module.": "name",
    "reward_manager.": "name source",
    "skip.async_rollout.": "action dump_dir enable steps",
    "skip.rollout.": "action dump_dir enable steps",
    "skip.rollout_tq.": "action dump_dir enable steps",
    "trainer.": "use_v1",
    "trainer.v1.colocate_async.": "num_warmup_batches",
    "trainer.v1.sampler.": "max_off_policy_strategy max_off_policy_threshold sync_refill_failed_groups",
    "trainer.v1.separate_async.hybrid_rollout.": (
        "adaptive_switch_threshold enable_switch switch_cost_window_size switch_threshold_ratio "
        "switch_threshold_release_steps switch_threshold_step_down switch_threshold_step_up "
    ),
    "trainer.v1.separate_async.": "num_warmup_batches parameter_sync_step",
    "trainer.v1.": "trainer_mode",
    "transfer_queue.backend.MooncakeStore.": (
        "auto_init device_name global_segment_size local_buffer_size local_hostname master_server_address "
        "metadata_server protocol "
    ),
    "transfer_queue.backend.SimpleStorage.": "num_data_storage_units total_storage_size",
    "transfer_queue.backend.": "storage_backend",
    "transfer_queue.": "enable",
    "transfer_queue.metrics.": "enabled port",
}
"""The names of options by what they begin with; for each, a rule or a reason."""
