"""slime's and Megatron's options of hardware, memory, files and bookkeeping: they change nothing that is learnt."""

from __future__ import annotations

from rlkit_convert.rules import without_equivalent

MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory (default: auto), and the gradient is the same"
SHARDING = (
    "nothing to do: fabric.strategy fsdp2 shards over all ranks; class FSDP2 has tensor_parallel, sequence_parallel "
    "(of context) and expert_parallel"
)
ARCHITECTURE = "nothing to do: model.path has the architecture"
SAME_GRADIENT = "nothing to do: the gradient is the same without it"
TYPES = "nothing to do: weights, gradients and optimizer states are float32, computed in fabric.precision"
WEIGHTS = "nothing to do: rlkit sends weights itself; rollout.engine.transport chooses how"
ROLLOUTS = "nothing to do: rollouts are saved in the run folder; log.rollouts"
RESUMED = "rlkit fit --resume RUN, or --resume auto with --out"
METRICS = "nothing to do: metrics are in metrics.jsonl"
DEVICES = "where a run takes place is set in the section `fabric:`; rlkit docs placement"

REMEDIES = {
    "use_dynamic_batch_size max_tokens_per_gpu log_probs_max_tokens_per_gpu log_probs_chunk_size micro_batch_size "
    "recompute_loss_function data_pad_size_multiplier variable_seq_lengths": MICRO,
    "balance_data balance_by_flops": "nothing to do: groups are divided among ranks by their tokens",
    "tensor_model_parallel_size sequence_parallel pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size decoder_first_pipeline_num_layers "
    "decoder_last_pipeline_num_layers num_layers_per_virtual_pipeline_stage allgather_cp": SHARDING,
    "recompute_method recompute_num_layers recompute_modules": "nothing to do: train.checkpoint_activations recomputes "
    "each layer",
    "swiglu num_layers hidden_size ffn_hidden_size num_attention_heads group_query_attention num_query_groups "
    "use_rotary_position_embeddings disable_bias_linear add_qkv_bias add_bias_linear normalization norm_epsilon "
    "rotary_base rotary_percent rotary_interleaved rotary_scaling_factor rotary_seq_len_interpolation_factor "
    "vocab_size padded_vocab_size make_vocab_size_divisible_by kv_channels qk_layernorm apply_layernorm_1p "
    "layernorm_zero_centered_gamma position_embedding_type no_position_embedding max_position_embeddings seq_length "
    "untie_embeddings_and_output_weights multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim v_head_dim "
    "qk_pos_emb_head_dim mscale mscale_all_dim beta_fast beta_slow use_rope_scaling rope_type rope_scaling_factor "
    "no_rope_fusion no_masked_softmax_fusion post_self_attn_layernorm post_mlp_layernorm attention_output_gate "
    "use_gated_attention num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate "
    "moe_layer_freq moe_router_topk moe_router_topk_scaling_factor moe_router_score_function moe_router_pre_softmax "
    "moe_router_num_groups moe_router_group_topk moe_router_dtype moe_router_enable_expert_bias moe_grouped_gemm "
    "moe_permute_fusion spec model_name enable_experimental mtp_num_layers mtp_loss_scaling_factor "
    "qwen_gdn_backend tokenizer_type tokenizer_model trust_remote_code": ARCHITECTURE,
    "moe_token_dispatcher_type moe_enable_deepep moe_token_drop_policy attention_backend deterministic_mode "
    "no_check_for_nan_in_loss_and_grad no_gradient_accumulation_fusion gradient_accumulation_fusion overlap_* "
    "use_distributed_optimizer no_persist_layer_norm cross_entropy_* transformer_impl megatron_deepgemm_* "
    "custom_megatron_init_path distributed_* train_env_vars train_backend no_rope_fusion manual_gc*": SAME_GRADIENT,
    "accumulate_allreduce_grads_in_fp32 attention_softmax_in_fp32 bf16 use_precision_aware_optimizer "
    "main_*_dtype exp_avg_dtype exp_avg_sq_dtype grad_reduce_in_bf16": TYPES,
    "optimizer_cpu_offload optimizer_offload_fraction offload offload_train release_train": "train.offload_during_"
    "rollout covers it",
    "offload_rollout": "rollout.engine.launch.release_memory covers it",
    "no_offload_train no_offload_rollout": "nothing to do: off",
    "num_gpus_per_node prefill_num_servers": DEVICES,
    "rollout_external_engine_addrs": "rollout.engine: SGLangServer with urls",
    "sglang_mem_fraction_static": "rollout.engine.launch.memory_fraction is the share of free memory when a server "
    "starts (default: 0.4)",
    "sglang_server_concurrency": "rollout.max_conversations bounds those at once",
    "sglang_* router_* use_slime_router": "an argument of the engine, in rollout.engine.launch.args",
    "update_weight_* custom_update_weight_post_write_path check_weight_update_equal": WEIGHTS,
    "ref_load": "nothing to do if model.path has the same weights, in Hugging Face's form: slime starts with them, and "
    "rlkit's reference is the policy at the start",
    "save save_hf save_retain_interval async_save ckpt_format no_save_rng dist_ckpt_*": "rlkit fit --out FOLDER; rlkit "
    "export writes a Hugging Face folder",
    "no_load_optim no_load_rng finetune start_rollout_id ckpt_step ref_ckpt_step": RESUMED,
    "wandb_* disable_wandb_random_suffix": "nothing to do: Wandb reads its key and host from the environment",
    "tb_*": "nothing to do: events are in tensorboard/ of the run folder",
    "log_* use_rollout_entropy get_mismatch_metrics custom_rollout_log_function_path "
    "custom_eval_rollout_log_function_path ci_* no_log_* timing_*": METRICS,
    "save_debug_* dump_details": ROLLOUTS,
    "memory_* record_memory_history profile* use_pytorch_profiler": "profile.steps writes traces of single steps",
    "use_fault_tolerance rollout_health_* http_proxy use_distributed_post rollout_data_transport": "nothing to do: "
    "servers that fail are restarted",
    "fetch_trajectory_retry_times min_batch_collection_ratio rollout_task_type": "nothing to do: options of slime's "
    "rollout buffer",
    "rollout_skip_special_tokens": "nothing to do: rewards read the text without special tokens",
    "metadata_key": "nothing to do: rewards take any column by its name",
    "loss_mask_type": "nothing to do: rlkit trains on the turns of the assistant as the chat template writes them",
    "disable_compute_advantages_and_returns debug_train_only": "nothing to do: what a loss does not read is not "
    "computed",
    "eval_max_prompt_len eval_max_context_len": "rollout.max_prompt_tokens is that of validation, too",
}  # fmt: skip

RULES = without_equivalent(REMEDIES)
