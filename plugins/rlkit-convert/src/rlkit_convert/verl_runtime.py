"""verl's options of hardware, memory, files and bookkeeping: they have no equivalent, and change nothing learnt."""

from __future__ import annotations

from rlkit_convert.rules import without_equivalent

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"

MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory (default: auto), and the gradient is the same"
RAY = "nothing to do: rlkit needs no Ray; on a cluster of Ray, see `rlkit docs clusters`"
PADDING = "nothing to do: padding is removed if the model allows it"
SERVER = "an argument of the engine, which belongs in rollout.engine.launch.args"
OFFLOAD = "train.offload_during_rollout covers it"
LOGPS = "nothing to do: log-probs are computed in slices without it"
SHARDING = "fabric.strategy: fsdp2 shards over all ranks; see the options of FSDP2"
MEGATRON = "rlkit shards with FSDP2: fabric.strategy"
TYPES = "trained weights are float32, computed in fabric.precision"
SAME_GRADIENT = "nothing to do: the gradient is the same without it"
STATES = "nothing to do: optimizer states are float32, and are saved"
TURNS = "nothing to do: the parser is detected from the chat template, and turns are joined token by token"
SEED = "nothing to do: train.seed determines the order of prompts and every sample"
ROLLOUTS = "nothing to do: rollouts are saved in the run folder; log.rollouts"
OWN_BATCHES = "nothing to do: the critic trains on the policy's batches"

SERVER_OPTIONS = (
    "enforce_eager max_num_batched_tokens max_num_seqs max_model_len enable_chunked_prefill dtype load_format "
    "engine_kwargs.* disable_log_stats layered_summon cudagraph_* update_weights_* enable_prefix_caching "
    "scheduling_policy logprobs_mode data_parallel_size expert_parallel_size pipeline_model_parallel_size "
    "disaggregation.* moe_load_balance_* skip_tokenizer_init limit_images"
)

REMEDIES = {
    "*_target_ *.rollout_n hydra.*": "nothing to do: verl's own bookkeeping",
    "data.val_batch_size data.validation_shuffle": "nothing to do: all validation prompts are sampled",
    "data.filter_overlong_prompts_workers": "nothing to do: prompts are tokenised on all CPUs",
    "data.dataloader_num_workers": "nothing to do: rows are read in the run's process",
    "data.return_*": "nothing to do: messages are always kept",
    "data.image_patch_size": "nothing to do: the model's own processor is used",
    "*.use_shm": "nothing to do: models and files are read in place",
    f"{MODEL}.use_remove_padding *.use_remove_padding": PADDING,
    "*.use_liger *.use_fused_kernels *.fused_kernel_options.*": LOGPS,
    "*.tiled_mlp.* *.pad_to_length* *.use_prefix_grouper *.load_weight": SAME_GRADIENT,
    "*.enable_activation_offload": "train.offload_activations",
    "*.data_loader_seed *.full_determinism actor_rollout_ref.rollout.seed": SEED,
    f"{ACTOR}.ppo_micro_batch_size* {REF}.log_prob_* {ROLLOUT}.log_prob_* critic.ppo_micro_batch_size*": MICRO,
    "critic.forward_* critic.use_dynamic_bsz critic.ppo_max_token_len_per_gpu critic.ppo_infer_*": MICRO,
    f"{ACTOR}.shuffle": "train.seed determines the order of mini-batches",
    f"{ACTOR}.calculate_entropy {ACTOR}.*sum_pi_squared*": "nothing to do: what is needed is always computed",
    f"{ACTOR}.use_torch_compile {REF}.use_torch_compile": "nothing to do: the trainer is not compiled",
    f"{ACTOR}.entropy_* {REF}.entropy_* critic.entropy_*": "nothing to do: entropy is computed in slices",
    f"{ACTOR}.fsdp_config.model_dtype {ACTOR}.fsdp_config.dtype": TYPES,
    f"{ACTOR}.fsdp_config.*": SHARDING,
    f"{ACTOR}.checkpoint.load_contents": "a run resumes from all that its checkpoint holds; model.path: CHECKPOINT "
    "starts from its weights alone",
    f"{ACTOR}.checkpoint.*": "nothing to do: checkpoints are written while the run continues",
    f"{REF}.fsdp_config.* critic.model.fsdp_config.*": OFFLOAD,
    f"{REF}.strategy {REF}.ulysses_sequence_parallel_size": "the reference is divided like the policy",
    "critic.strategy critic.ulysses_*": "the critic is sharded like the policy: fabric.strategy",
    "*.megatron.* *.veomni.* *.torchtitan.* *.nccl_timeout_seconds": MEGATRON,
    "*.optim.clip_grad *.optim.total_training_steps *.optim.zero_indexed_step": "nothing to do: follows other options",
    "*.optim.use_checkpoint_opt_* *.optim.use_layer_wise_* *.optim.use_precision_* *.optim.*_dtype": STATES,
    "*.optim.muon_* *.optim.lr_wsd_* *.optim.weight_decay_incr_style": "options of train.optimizer: Muon, or of "
    "train.schedule",
    f"{ROLLOUT}.mode": "nothing to do: conversations are always independent",
    f"{ROLLOUT}.gpu_memory_utilization": "rollout.engine.launch.memory_fraction is the fraction of free memory when a "
    "server starts (default: 0.4)",
    f"{ROLLOUT}.calculate_log_probs": "nothing to do: the engine's log-probs are always compared",
    f"{ROLLOUT}.multi_stage_wake_up": "nothing to do: engines order their own allocations",
    f"{ROLLOUT}.trace.* {ROLLOUT}.agent.num_workers": ROLLOUTS,
    f"{ROLLOUT}.skip_* skip.*": "rlkit replay RUN --step N --phase learn trains on saved rollouts",
    f"{ROLLOUT}.prometheus.*": "nothing to do: metrics are in metrics.jsonl",
    f"{ROLLOUT}.checkpoint_engine.* {ROLLOUT}.layer_name_map.* transfer_queue.*": "nothing to do: rlkit sends weights "
    "and samples itself",
    f"{ROLLOUT}.multi_turn.format {ROLLOUT}.multi_turn.tokenization_sanity_check_mode "
    f"{ROLLOUT}.multi_turn.use_inference_chat_template": TURNS,
    f"{ROLLOUT}.nnodes {ROLLOUT}.n_gpus_per_node": "engines on GPUs of their own: VllmServer, SGLangServer",
    " ".join(f"{ROLLOUT}.{name}" for name in SERVER_OPTIONS.split()): SERVER,
    "actor_rollout_ref.hybrid_engine": "nothing to do: an engine shares the trainer's GPUs",
    "actor_rollout_ref.nccl_timeout critic.nccl_timeout": "train.deadline is how long a rank waits for its peers",
    "critic.model.enable_gradient_checkpointing": "train.checkpoint_activations also applies to the critic",
    "critic.enable critic.shuffle critic.ppo_mini_batch_size": OWN_BATCHES,
    "critic.checkpoint.*": "nothing to do: a checkpoint also holds the critic; save.optimizer applies to both",
    "critic.model.tokenizer_path critic.model.external_lib": "nothing to do: the critic uses the policy's tokenizer",
    "critic.model.override_config.*": "the critic has the values of model.config if critic.path is null",
    "critic.model.trust_remote_code": "model.trust_remote_code also applies to the critic",
    "reward.num_workers": "nothing to do: rewards run in worker processes with a deadline each",
    "reward_manager.* reward.reward_manager.*": "nothing to do: names verl's own class",
    "*.lora.merge *.lora.freeze_* *.lora.a2a_*": "nothing to do: only adapters are trained; rlkit export merges them",
    "algorithm.pf_ppo.*": "nothing to do: an option of use_pf_ppo",
    "trainer.max_critic_ckpt_to_keep": "save.keep_last counts checkpoints, which include the critic",
    "trainer.resume_*": "rlkit fit --resume RUN, or --resume auto with --out",
    "trainer.default_local_dir": "rlkit fit --out FOLDER; save.folder for checkpoints alone",
    "trainer.default_hdfs_dir": "save.folder may be any URL that fsspec opens",
    "trainer.log_val_generations trainer.validation_data_dir": "nothing to do: all validation completions are saved in "
    "rollouts/",
    "trainer.rollout_data_dir": ROLLOUTS,
    "trainer.balance_batch": "nothing to do: groups are always divided among ranks by their tokens",
    "trainer.esi_redundant_time": "nothing to do: a signal saves a checkpoint",
    "trainer.del_local_*": "nothing to do: save.keep_last removes a loaded checkpoint once a newer one is complete",
    "trainer.device": "fabric.accelerator",
    "trainer.ray_* ray_* trainer.use_legacy_worker_impl": RAY,
    "trainer.use_v1 trainer.v1.*": "nothing to do: an option of verl's asynchronous modes",
    "*.profiler.* global_profiler.*": "profile.steps writes traces of single steps to the run folder",
}  # fmt: skip

RULES = without_equivalent(REMEDIES)
