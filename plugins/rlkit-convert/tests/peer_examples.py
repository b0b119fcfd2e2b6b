"""Published example configurations of verl and TRL: the options that they set, in a form of our own.

verl: examples/grpo_trainer/run_qwen2_5-3b_gsm8k_grpo_lora.sh, ppo_trainer/run_qwen2-7b_rm.sh,
rloo_trainer/run_qwen2-7b.sh, remax_trainer/run_qwen2.5-3b_seq_balance.sh, gspo_trainer/test_gspo_3b_math.sh,
sglang_multiturn/run_qwen2.5-3b_gsm8k_multiturn.sh, recipe/dapo/run_dapo_qwen2.5_32b.sh. TRL: examples/scripts/gspo.py,
grpo_agent.py, ppo/ppo_tldr.py, and rloo.py, whose options stand in Python there.
"""

from __future__ import annotations

ENGINE = (
    "actor_rollout_ref.rollout.name={name} actor_rollout_ref.rollout.tensor_model_parallel_size={tp} "
    "actor_rollout_ref.rollout.gpu_memory_utilization={memory} actor_rollout_ref.model.use_remove_padding=True "
    "actor_rollout_ref.model.enable_gradient_checkpointing=True actor_rollout_ref.ref.fsdp_config.param_offload=True "
    "actor_rollout_ref.actor.fsdp_config.param_offload=False "
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=False"
)
GSM8K = (
    "data.train_files=$HOME/data/gsm8k/train.parquet data.val_files=$HOME/data/gsm8k/test.parquet "
    "data.filter_overlong_prompts=True data.truncation='error'"
)
PLACE = (
    "trainer.critic_warmup=0 trainer.logger=['console','wandb'] trainer.n_gpus_per_node=8 trainer.nnodes=1 "
    "trainer.experiment_name=run $@"
)
KL_IN_REWARD = (
    "algorithm.use_kl_in_reward=True algorithm.kl_penalty=kl algorithm.kl_ctrl.kl_coef=0.001 "
    "actor_rollout_ref.actor.use_kl_loss=False"
)
KL_IN_LOSS = (
    "algorithm.use_kl_in_reward=False actor_rollout_ref.actor.use_kl_loss=True "
    "actor_rollout_ref.actor.kl_loss_coef=0.001 actor_rollout_ref.actor.kl_loss_type=low_var_kl "
    "actor_rollout_ref.actor.entropy_coeff=0"
)

LORA = f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo {GSM8K} \\
    data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 data.shuffle=False \\
    actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct actor_rollout_ref.model.use_shm=True \\
    actor_rollout_ref.model.lora_rank=64 actor_rollout_ref.model.lora_alpha=32 \\
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=40 {KL_IN_LOSS} \\
    {ENGINE.format(name="vllm", tp=2, memory=0.6)} actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.rollout.load_format=safetensors actor_rollout_ref.rollout.layered_summon=True \\
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=40 trainer.project_name=verl_grpo_example_gsm8k \\
    trainer.save_freq=20 trainer.test_freq=5 trainer.total_epochs=15 {PLACE}
"""
PPO_REWARD_MODEL = f"""gsm8k=$HOME/data/gsm8k
math=$HOME/data/math
train_files="['$gsm8k/train.parquet', '$math/train.parquet']"
huggingface-cli download Qwen/Qwen2-7B-Instruct --local-dir $HOME/models/Qwen2-7B-Instruct &
python3 -m verl.trainer.main_ppo data.train_files="$train_files" data.val_files="['$gsm8k/test.parquet']" \\
    data.train_batch_size=1024 data.max_prompt_length=1024 data.max_response_length=512 data.return_raw_chat=True \\
    actor_rollout_ref.model.path="$HOME/models/Qwen2-7B-Instruct" actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    {ENGINE.format(name="vllm", tp=1, memory=0.6)} critic.optim.lr=1e-5 critic.model.use_remove_padding=True \\
    critic.optim.lr_warmup_steps_ratio=0.05 critic.model.path="$HOME/models/Qwen2-7B-Instruct" \\
    critic.ppo_micro_batch_size_per_gpu=32 critic.model.fsdp_config.param_offload=False reward_model.enable=True \\
    reward_model.model.path="$HOME/models/FsfairX-LLaMA3-RM-v0.1" reward_model.micro_batch_size_per_gpu=32 \\
    reward_model.model.use_remove_padding=True algorithm.use_kl_in_reward=False +trainer.val_before_train=False \\
    trainer.project_name=verl_example trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 {PLACE}
"""
RLOO = f"""python3 -m verl.trainer.main_ppo algorithm.adv_estimator=rloo {GSM8K} data.train_batch_size=1024 \\
    data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 \\
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=160 actor_rollout_ref.rollout.n=5 \\
    {ENGINE.format(name="vllm", tp=2, memory=0.6)} {KL_IN_REWARD} trainer.project_name=verl_rloo_example_gsm8k \\
    trainer.save_freq=-1 trainer.test_freq=5 trainer.total_epochs=15 {PLACE}
"""
REMAX = f"""export HF_DATASETS_OFFLINE=1
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=remax {GSM8K} data.train_batch_size=512 \\
    data.max_prompt_length=512 data.max_response_length=1024 actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=128 \\
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=30000 \\
    {ENGINE.format(name="vllm", tp=2, memory=0.8)} actor_rollout_ref.rollout.n=4 {KL_IN_REWARD} \\
    trainer.project_name=verl_remax_example_gsm8k trainer.val_before_train=False trainer.save_freq=-1 \\
    trainer.test_freq=5 trainer.total_epochs=5 {PLACE}
"""
MULTITURN = f"""PROJECT_DIR="$(pwd)"
CONFIG_PATH="$PROJECT_DIR/examples/sglang_multiturn/config"
python3 -m verl.trainer.main_ppo --config-path="$CONFIG_PATH" --config-name='gsm8k_multiturn_grpo' \\
    algorithm.adv_estimator=grpo {GSM8K} data.train_batch_size=256 data.max_prompt_length=1024 \\
    data.max_response_length=1024 data.return_raw_chat=True actor_rollout_ref.model.path=Qwen/Qwen2.5-3B-Instruct \\
    actor_rollout_ref.actor.optim.lr=1e-6 actor_rollout_ref.actor.ppo_mini_batch_size=256 {KL_IN_LOSS} \\
    {ENGINE.format(name="sglang_async", tp=2, memory=0.5)} actor_rollout_ref.rollout.n=16 \\
    actor_rollout_ref.rollout.multi_turn.tool_config_path="$PROJECT_DIR/gsm8k_tool_config.yaml" \\
    trainer.project_name=gsm8k_async_rl trainer.save_freq=-1 trainer.test_freq=20 trainer.total_epochs=15 {PLACE}
"""
GSPO = """export GPUS_PER_NODE=8
NNODES=${SLURM_JOB_NUM_NODES}
export NNODES
MODEL_PATH=Qwen/Qwen2.5-3B-Instruct
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 8))
overlong_buffer_len=$((1024 * 4))
exp_name="gspo-$(basename $MODEL_PATH)"
token_len=$(((max_prompt_length + max_response_length) * 2))
if [ "$first_time_dataset_prep" = true ]; then
    python examples/data_preprocess/gsm8k.py --local_save_dir /data/gsm8k/
fi
train_files="['/data/gsm8k/train.parquet']"
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.actor.policy_loss.loss_mode=gspo \\
    data.train_files="${train_files}" data.val_files="['/data/gsm8k/test.parquet']" data.shuffle=true \\
    data.prompt_key=prompt data.truncation='error' data.filter_overlong_prompts=true data.train_batch_size=512 \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    actor_rollout_ref.rollout.n=16 algorithm.use_kl_in_reward=false algorithm.kl_ctrl.kl_coef=0.0 \\
    actor_rollout_ref.actor.use_kl_loss=false actor_rollout_ref.actor.kl_loss_coef=0.0 \\
    actor_rollout_ref.actor.clip_ratio_low=0.0003 actor_rollout_ref.actor.clip_ratio_high=0.0004 \\
    actor_rollout_ref.actor.use_dynamic_bsz=true actor_rollout_ref.actor.ppo_max_token_len_per_gpu=${token_len} \\
    actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async \\
    actor_rollout_ref.model.path="${MODEL_PATH}" actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.05 actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=128 actor_rollout_ref.actor.fsdp_config.param_offload=true \\
    actor_rollout_ref.actor.loss_agg_mode="seq-mean-token-mean" actor_rollout_ref.actor.grad_clip=1.0 \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=1 actor_rollout_ref.rollout.enable_chunked_prefill=true \\
    actor_rollout_ref.rollout.max_num_batched_tokens=$((max_prompt_length + max_response_length)) \\
    actor_rollout_ref.rollout.temperature=1.0 actor_rollout_ref.rollout.top_p=1.0 actor_rollout_ref.rollout.top_k=-1 \\
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \\
    actor_rollout_ref.rollout.val_kwargs.top_k=-1 actor_rollout_ref.rollout.val_kwargs.do_sample=true \\
    actor_rollout_ref.rollout.val_kwargs.n=1 actor_rollout_ref.actor.entropy_checkpointing=true \\
    reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=false \\
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=${overlong_buffer_len} \\
    +reward_model.reward_kwargs.max_resp_len=${max_response_length} trainer.logger='["console","wandb"]' \\
    trainer.project_name=RL-GSPO trainer.experiment_name="${exp_name}" trainer.n_gpus_per_node="${GPUS_PER_NODE}" \\
    trainer.nnodes="${NNODES}" trainer.val_before_train=false trainer.test_freq=10 trainer.save_freq=10 \\
    trainer.total_epochs=10 trainer.total_training_steps=500 trainer.resume_mode=auto trainer.log_val_generations=2 $@
"""
DAPO = """set -euxo pipefail
overlong_buffer_len=$((1024 * 4))
train_prompt_bsz=512
gen_prompt_bsz=$((train_prompt_bsz * 3))
NNODES=${NNODES:-16}
RAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}
MODEL_PATH=${MODEL_PATH:-"${RAY_DATA_HOME}/models/Qwen2.5-32B"}
TRAIN_FILE=${TRAIN_FILE:-"${RAY_DATA_HOME}/data/dapo-math-17k.parquet"}
max_prompt_length=$((1024 * 2))
max_response_length=$((1024 * 20))
ray job submit --no-wait --working-dir "${PWD}" -- python3 -m recipe.dapo.main_dapo \\
    data.train_files="${TRAIN_FILE}" data.val_files="${RAY_DATA_HOME}/data/aime-2024.parquet" data.truncation='left' \\
    data.max_prompt_length=${max_prompt_length} data.max_response_length=${max_response_length} \\
    data.gen_batch_size=${gen_prompt_bsz} data.train_batch_size=${train_prompt_bsz} \\
    actor_rollout_ref.rollout.n=16 algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False \\
    actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.clip_ratio_low=0.2 \\
    actor_rollout_ref.actor.clip_ratio_high=0.28 actor_rollout_ref.actor.clip_ratio_c=10.0 \\
    algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10 \\
    algorithm.filter_groups.metric=acc actor_rollout_ref.model.path="${MODEL_PATH}" \\
    +actor_rollout_ref.model.override_config.attention_dropout=0. actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.optim.lr_warmup_steps=10 actor_rollout_ref.actor.optim.weight_decay=0.1 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.actor.entropy_coeff=0 \\
    actor_rollout_ref.actor.grad_clip=1.0 actor_rollout_ref.actor.loss_agg_mode=token-mean \\
    actor_rollout_ref.actor.ulysses_sequence_parallel_size=8 actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 \\
    actor_rollout_ref.rollout.gpu_memory_utilization=0.80 actor_rollout_ref.rollout.tensor_model_parallel_size=4 \\
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.n=1 \\
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 actor_rollout_ref.rollout.name=vllm \\
    reward_model.reward_manager=dapo reward_model.overlong_buffer.enable=True \\
    reward_model.overlong_buffer.len=${overlong_buffer_len} reward_model.overlong_buffer.penalty_factor=1.0 \\
    trainer.logger='["console","wandb"]' trainer.project_name=DAPO trainer.experiment_name=DAPO-Qwen2.5-32B \\
    trainer.n_gpus_per_node=8 trainer.nnodes="${NNODES}" trainer.val_before_train=True trainer.test_freq=5 \\
    trainer.save_freq=5 trainer.total_epochs=1 trainer.resume_mode=auto
"""

TRL_GSPO = """accelerate launch --config_file accelerate_configs/deepspeed_zero3.yaml examples/scripts/gspo.py \\
    --model_name_or_path Qwen/Qwen3-0.6B --output_dir gspo-Qwen3-0.6B --learning_rate 1e-5 --dtype bfloat16 \\
    --max_completion_length 1024 --use_peft --lora_target_modules "q_proj", "v_proj" --log_completions \\
    --per_device_train_batch_size 8 --num_generations 8 --importance_sampling_level sequence --epsilon 3e-4 \\
    --epsilon_high 4e-4 --beta 0.0 --loss_type grpo --gradient_accumulation_steps 2 --steps_per_generation 8
"""
TRL_AGENT = """python examples/scripts/grpo_agent.py --model_name_or_path Qwen/Qwen3-1.7B --push_to_hub True \\
    --output_dir grpo_biogrid_qwen_3g-1.7b --use_vllm True --vllm_mode colocate --max_completion_length 1024 \\
    --report_to trackio --log_completions True --max_steps 400
"""
TRL_PPO = """python examples/scripts/ppo/ppo_tldr.py --dataset_name trl-lib/tldr --dataset_test_split validation \\
    --learning_rate 3e-6 --output_dir pythia-1b --per_device_train_batch_size 1 --gradient_accumulation_steps 64 \\
    --total_episodes 30000 --model_name_or_path EleutherAI/pythia-1b-deduped --missing_eos_penalty 1.0 \\
    --sft_model_path cleanrl/EleutherAI_pythia-1b-deduped__sft__tldr --stop_token eos --response_length 53 \\
    --reward_model_path cleanrl/EleutherAI_pythia-1b-deduped__reward__tldr --eval_strategy steps --eval_steps 100
"""
TRL_RLOO = """trl rloo --model_name_or_path Qwen/Qwen3-0.6B --dataset_name AI-MO/NuminaMath-TIR --learning_rate 1e-5 \\
    --output_dir Qwen3-0.6B-RLOO --log_completions --num_completions_to_print 2 --max_completion_length 1024 \\
    --gradient_accumulation_steps 2 --steps_per_generation 8 --use_vllm --vllm_mode colocate \\
    --vllm_gpu_memory_utilization 0.5 --use_peft --reward_funcs think_format_reward accuracy_reward
"""

VERL = {
    "grpo with lora": LORA, "ppo with a reward model": PPO_REWARD_MODEL, "rloo": RLOO, "remax": REMAX,
    "several turns": MULTITURN, "gspo": GSPO, "dapo": DAPO,
}  # fmt: skip
TRL = {"gspo": TRL_GSPO, "agent": TRL_AGENT, "ppo": TRL_PPO, "rloo": TRL_RLOO}

TRL_OPTIONS = """
accelerator_config activation_checkpointing activation_checkpointing_kwargs adam_beta1 adam_beta2 adam_epsilon
attn_implementation auto_find_batch_size average_tokens_across_devices batch_eval_metrics beta bf16 bf16_full_eval
bnb_4bit_quant_storage bnb_4bit_quant_type cache_implementation cast_lm_head_to_fp32 chat_template_kwargs data_seed
dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_config dataset_name
dataset_streaming dataset_test_split dataset_train_split ddp_backend ddp_broadcast_buffers ddp_bucket_cap_mb
ddp_find_unused_parameters ddp_static_graph ddp_timeout debug deepspeed delta disable_dropout disable_tqdm do_eval
do_predict do_train ds3_gather_for_generation dtype enable_jit_checkpoint entropy_coef entropy_coef_delta
entropy_coef_max entropy_coef_min entropy_target epsilon epsilon_high eval_accumulation_steps eval_delay
eval_do_concat_batches eval_on_start eval_steps eval_strategy eval_use_gather_object fp16 fp16_full_eval fsdp
fsdp_config full_determinism generation_batch_size generation_kwargs gradient_accumulation_steps
gradient_checkpointing gradient_checkpointing_kwargs greater_is_better hub_always_push hub_model_id hub_private_repo
hub_revision hub_strategy hub_token ignore_bias_buffers ignore_data_skip importance_sampling_level
include_for_metrics include_num_input_tokens_seen label_names label_smoothing_factor learning_rate
length_column_name liger_kernel_config load_best_model_at_end load_in_4bit load_in_8bit local_rank log_completions
log_completions_hub_repo log_level log_level_replica log_multimodal log_on_each_node log_unique_prompts
logging_first_step logging_nan_inf_filter logging_steps logging_strategy lora_alpha lora_dropout
lora_modules_to_save lora_r lora_target_modules lora_target_parameters lora_task_type loss_type lr_scheduler_kwargs
lr_scheduler_type mask_truncated_completions max_completion_length max_grad_norm max_steps
max_tool_calling_iterations metric_for_best_model min_p model_init_kwargs model_name_or_path model_revision
multi_objective_aggregation neftune_noise_alpha normalize_advantages num_completions_to_print num_generations
num_generations_eval num_iterations num_train_epochs off_policy_mask_threshold optim optim_args optim_target_modules
output_dir pad_to_multiple_of parallelism_config per_device_eval_batch_size per_device_train_batch_size
prediction_loss_only project push_to_hub ref_model_mixup_alpha ref_model_sync_steps remove_unused_columns
repetition_penalty report_to restore_callback_states_from_checkpoint resume_from_checkpoint reward_clip_range
reward_weights router_aux_loss_coef run_name sapo_temperature_neg sapo_temperature_pos save_on_each_node
save_only_model save_steps save_strategy save_total_limit scale_rewards seed shuffle_dataset skip_memory_metrics
steps_per_generation sync_ref_model temperature tf32 top_entropy_quantile top_k top_p torch_compile
torch_compile_backend torch_compile_mode torch_empty_cache_steps trackio_bucket_id trackio_space_id
trackio_static_space_id train_sampling_strategy transformers_continuous_batching_config trust_remote_code
use_adaptive_entropy use_bias_correction_kl use_bnb_nested_quant use_cache use_cpu use_dora use_liger_kernel
use_peft use_rslora use_transformers_continuous_batching use_transformers_paged use_vllm vespo_k_neg vespo_k_pos
vespo_lambda_neg vespo_lambda_pos vllm_enable_sleep_mode vllm_gpu_memory_utilization vllm_group_port
vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_max_model_length vllm_mode vllm_model_impl
vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout vllm_structured_outputs_regex
vllm_tensor_parallel_size warmup_steps weight_decay
"""
"""The options of TRL 1.16's GRPO and RLOO, transformers' among them, and of its models and scripts."""

VERL_OPTIONS = {
    "actor_rollout_ref.": "hybrid_engine nccl_timeout",
    "actor_rollout_ref.actor.": "_target_ strategy ppo_mini_batch_size ppo_micro_batch_size "
    "ppo_micro_batch_size_per_gpu use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio "
    "clip_ratio_low clip_ratio_high clip_ratio_c loss_agg_mode "
    "entropy_coeff use_kl_loss use_torch_compile kl_loss_coef kl_loss_type ppo_epochs shuffle use_fused_kernels "
    "grad_clip ulysses_sequence_parallel_size entropy_from_logits_with_chunking entropy_checkpointing "
    "use_remove_padding checkpoint.save_contents checkpoint.load_contents checkpoint.async_save profiler.enable",
    "actor_rollout_ref.actor.policy_loss.": "loss_mode clip_cov_ratio clip_cov_lb clip_cov_ub kl_cov_ratio ppo_kl_coef",
    "actor_rollout_ref.actor.optim.": "lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps "
    "min_lr_ratio num_cycles warmup_style",
    "actor_rollout_ref.actor.fsdp_config.": "param_offload optimizer_offload offload_policy reshard_after_forward "
    "fsdp_size forward_prefetch wrap_policy.min_num_params",
    "actor_rollout_ref.ref.": "strategy use_torch_compile log_prob_micro_batch_size log_prob_use_dynamic_bsz "
    "log_prob_max_token_len_per_gpu profiler.tool model fsdp_config.param_offload ulysses_sequence_parallel_size "
    "entropy_from_logits_with_chunking entropy_checkpointing",
    "actor_rollout_ref.rollout.": "name mode temperature top_k top_p prompt_length response_length dtype "
    "gpu_memory_utilization ignore_eos enforce_eager cudagraph_capture_sizes free_cache_engine "
    "tensor_model_parallel_size max_num_batched_tokens max_model_len max_num_seqs log_prob_micro_batch_size "
    "disable_log_stats do_sample n over_sample_rate multi_stage_wake_up engine_kwargs.sglang.attention_backend "
    "calculate_log_probs agent.num_workers agent.agent_loop_config_path agent.custom_async_server.path "
    "update_weights_bucket_megabytes trace.backend skip_rollout skip_dump_dir profiler.enable enable_chunked_prefill "
    "load_format layered_summon",
    "actor_rollout_ref.rollout.val_kwargs.": "top_k top_p temperature n do_sample",
    "actor_rollout_ref.rollout.multi_turn.": "enable max_assistant_turns tool_config_path max_user_turns "
    "max_parallel_calls max_tool_response_length tool_response_truncate_side interaction_config_path "
    "use_inference_chat_template tokenization_sanity_check_mode format",
    "actor_rollout_ref.model.": "path custom_chat_template use_shm external_lib override_config.attn_implementation "
    "enable_gradient_checkpointing enable_activation_offload use_remove_padding lora_rank lora_alpha target_modules "
    "exclude_modules use_liger use_fused_kernels fused_kernel_options.impl_backend trust_remote_code",
    "data.": "tokenizer use_shm train_files val_files prompt_key reward_fn_key max_prompt_length max_response_length "
    "train_batch_size val_batch_size return_raw_input_ids return_raw_chat return_full_prompt shuffle "
    "dataloader_num_workers validation_shuffle filter_overlong_prompts filter_overlong_prompts_workers truncation "
    "image_key video_key trust_remote_code custom_cls.path custom_cls.name return_multi_modal_inputs "
    "sampler.class_path sampler.class_name datagen.path apply_chat_template_kwargs.enable_thinking seed gen_batch_size",
    "critic.": "rollout_n strategy enable ppo_mini_batch_size ppo_micro_batch_size use_dynamic_bsz "
    "ppo_max_token_len_per_gpu forward_max_token_len_per_gpu ppo_epochs shuffle cliprange_value loss_agg_mode "
    "checkpoint.save_contents profiler.enable forward_micro_batch_size ulysses_sequence_parallel_size grad_clip",
    "critic.optim.": "lr lr_warmup_steps_ratio total_training_steps weight_decay lr_warmup_steps min_lr_ratio "
    "warmup_style",
    "critic.model.": "path tokenizer_path override_config.x external_lib trust_remote_code use_shm "
    "enable_gradient_checkpointing enable_activation_offload use_remove_padding fsdp_config.param_offload lora_rank "
    "lora_alpha target_modules",
    "reward_model.": "enable strategy model.input_tokenizer model.path model.trust_remote_code micro_batch_size "
    "max_length use_dynamic_bsz reward_manager launch_reward_fn_async sandbox_fusion.url profiler.enable",
    "custom_reward_function.": "path name",
    "algorithm.": "gamma lam adv_estimator norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.type "
    "kl_ctrl.kl_coef kl_ctrl.horizon kl_ctrl.target_kl use_pf_ppo pf_ppo.weight_pow",
    "trainer.": "balance_batch total_epochs total_training_steps project_name experiment_name logger "
    "log_val_generations rollout_data_dir validation_data_dir nnodes n_gpus_per_node save_freq esi_redundant_time "
    "resume_mode resume_from_path val_before_train val_only test_freq critic_warmup default_hdfs_dir "
    "del_local_ckpt_after_load default_local_dir max_actor_ckpt_to_keep max_critic_ckpt_to_keep "
    "ray_wait_register_center_timeout device use_legacy_worker_impl",
    "global_profiler.": "tool steps profile_continuous_steps save_path",
    "ray_kwargs.": "ray_init.num_cpus timeline_json_file",
}
"""The options of verl's generated configuration of PPO, `_generated_ppo_trainer.yaml`, by what they begin with."""
