"""verl's options, those of `verl.trainer.main_ppo`, and what becomes of each."""

from __future__ import annotations

import re

from rlkit.cli.convert.source import Given, lines_of, of_yaml
from rlkit.cli.convert.table import READ, Rule, To, Without, flag, number, one_of, text, unlimited, whole

DATA, MODEL, ACTOR, ROLLOUT = "data", "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF, CRITIC, ALGORITHM, TRAINER = "actor_rollout_ref.ref", "critic", "algorithm", "trainer"
MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory in tokens, auto by default, never the gradient"
RAY = "nothing to do: rlkit runs without Ray"
PADDING = "nothing to do: padding is left out where the model allows it"
SERVER = "an argument of the engine; SGLang's go into rollout.engine.launch.args"
OFFLOAD = "train.offload_during_rollout covers it"
ONE_BATCH = "the critic learns from the mini-batches of the policy"
LOGPS = "nothing to do: log-probs are computed in slices without it"
MEGATRON = "rlkit shards with FSDP2: fabric.strategy"

DEFAULTS: dict[str, object] = {
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "algorithm.adv_estimator": "gae",
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.train_batch_size": 1024,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.rollout.n": 1,
    "trainer.save_freq": -1,
    "trainer.test_freq": -1,
    "trainer.n_gpus_per_node": 8,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
}
"""verl's defaults that differ from rlkit's."""

AGGREGATION = one_of({
    "token-mean": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm", "token-sum": "token_sum",
})  # fmt: skip
ESTIMATORS = one_of({
    **{name: name for name in ("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+")},
    "kl": "k1", "mse": "k2", "low_var_kl": "k3", "kl+": "k1+", "mse+": "k2+", "low_var_kl+": "k3+",
})  # fmt: skip
ADVANTAGES = {
    "gae": "GAE", "grpo": "GRPO", "grpo_vectorized": "GRPO", "rloo": "RLOO", "rloo_vectorized": "RLOO",
    "reinforce_plus_plus": "ReinforcePP", "reinforce_plus_plus_baseline": "ReinforcePPBaseline", "remax": "ReMax",
    "opo": "OPO", "grpo_passk": "PassK", "gpg": "GPG", "gdpo": "GDPO",
    "optimal_token_baseline": "OptimalTokenBaseline", "tir_optimal_token_baseline": "OptimalTokenBaseline",
}  # fmt: skip
LOSSES = {
    "vanilla": "ClipLoss", "gspo": "GSPO", "gpg": "PolicyGradient", "clip_cov": "ClipCov", "kl_cov": "KLCov",
    "geo_mean": "GMPO", "cispo": "CISPO", "sapo": "SAPO", "dppo_tv": "DPPO", "dppo_kl": "DPPO",
}  # fmt: skip


def interval(value: object) -> int:
    """Return steps between two, 0 for none, where verl has -1."""
    return max(whole(value), 0)


OTHERS = {
    "actor_rollout_ref.actor.use_remove_padding critic.use_remove_padding": PADDING,
    "actor_rollout_ref.actor.use_fused_kernels actor_rollout_ref.model.fused_kernel_options.*": LOGPS,
    "*.profiler.* global_profiler.*": "profile.steps leaves a trace of single steps in the run folder",
    "actor_rollout_ref.ref.use_torch_compile": "nothing to do: the trainer is not compiled",
    "actor_rollout_ref.ref.model*": "the reference is the initial policy; the section `reference:` lets it follow",
    "actor_rollout_ref.ref.entropy_*": "nothing to do: the reference computes no entropy",
    f"{ROLLOUT}.cudagraph_* {ROLLOUT}.update_weights_*": SERVER,
    f"{ROLLOUT}.multi_stage_wake_up": "nothing to do: an engine takes its memory in the order that fits",
    f"{ROLLOUT}.trace.*": "nothing to do: rollouts are kept token by token; rlkit report shows them",
    f"{ROLLOUT}.skip_*": "rlkit replay RUN --step N --phase learn learns from the rollouts of a run",
    f"{MODEL}.custom_chat_template": "put the template into the model's folder",
    f"{MODEL}.enable_activation_offload critic.model.enable_activation_offload": "train.checkpoint_activations",
    f"{MODEL}.exclude_modules": "model.lora.targets names the modules that get an adapter",
    "data.tokenizer": "nothing to do: the model's own tokenizer",
    "*.use_shm": "nothing to do: files are read from where they are",
    "data.return_*": "nothing to do: messages are always kept",
    "data.validation_shuffle": "nothing to do: all validation prompts are answered",
    "data.video_key": "rlkit trains on text alone",
    "data.datagen.*": "write a task as a plugin: rlkit plugins new NAME --kind task",
    "critic.rollout_n critic.enable critic.shuffle": "nothing to do: the critic learns from the policy's batches",
    "critic.strategy critic.ulysses_*": "the critic is sharded as the policy is: fabric.strategy",
    "critic.loss_agg_mode": "the critic's loss is a mean over all tokens",
    "critic.checkpoint.*": "nothing to do: a checkpoint holds all that a run needs to go on",
    "critic.model.tokenizer_path critic.model.external_lib": "nothing to do: the critic has the policy's tokenizer",
    "critic.model.override_config.*": "fields of a model cannot be changed",
    "critic.model.trust_remote_code": "model.trust_remote_code holds for the critic too",
    "trainer.esi_redundant_time trainer.del_local_*": "nothing to do: a signal saves a checkpoint; save.keep_last",
    "trainer.use_legacy_worker_impl": RAY,
}
"""What to do about other options."""

RULES: dict[str, Rule] = {
    "*_target_": Without("nothing to do: verl's own bookkeeping"),
    "data.train_files": To("task.path"),
    "data.val_files": To("task.validation_path"),
    "data.train_batch_size": To("train.prompts_per_step", whole),
    "data.max_prompt_length": To("rollout.max_prompt_tokens", whole),
    "data.max_response_length": To("rollout.sampling.max_tokens", whole),
    "data.seed": To("train.seed", whole),
    "data.truncation": READ,
    "data.filter_overlong_prompts": READ,
    "data.trust_remote_code": To("model.trust_remote_code", flag),
    "data.prompt_key": READ,
    "data.reward_fn_key": Without("the task Verl reads `data_source`; where the column has another name, rename it"),
    "data.shuffle": READ,
    "data.val_batch_size": Without("nothing to do: all validation prompts are answered together"),
    "data.gen_batch_size": Without("rollout.oversample starts more prompts than a step trains on"),
    "data.filter_overlong_prompts_workers": Without("nothing to do: prompts are tokenised on all CPUs"),
    "data.dataloader_num_workers": Without("nothing to do: rows are read in the run's process"),
    "data.custom_cls.*": Without("write a task as a plugin: rlkit plugins new NAME --kind task"),
    "data.sampler.*": Without("curriculum: Difficulty or SuccessRate, or a plugin's"),
    "data.image_key": Without("rlkit trains on text alone"),
    f"{MODEL}.path": To("model.path", text),
    f"{MODEL}.trust_remote_code": To("model.trust_remote_code", flag),
    f"{MODEL}.enable_gradient_checkpointing": To("train.checkpoint_activations", flag),
    f"{MODEL}.lora_rank": READ,
    f"{MODEL}.lora_alpha": READ,
    f"{MODEL}.target_modules": READ,
    f"{MODEL}.use_remove_padding": Without(PADDING),
    f"{MODEL}.use_shm": Without("nothing to do: models are read from where they are"),
    f"{MODEL}.external_lib": Without("code of yours is a plugin: rlkit plugins new NAME"),
    f"{MODEL}.use_liger": Without(LOGPS),
    f"{MODEL}.use_fused_kernels": Without(LOGPS),
    f"{MODEL}.override_config.*": Without("model.attention sets the implementation; other fields cannot be changed"),
    f"{ACTOR}.optim.lr": To("train.lr", number),
    f"{ACTOR}.optim.weight_decay": To("train.weight_decay", number),
    f"{ACTOR}.optim.betas": To("train.optimizer.betas"),
    f"{ACTOR}.optim.*": READ,
    f"{ACTOR}.grad_clip": To("train.max_grad_norm", number),
    f"{ACTOR}.ppo_epochs": To("train.epochs", whole),
    f"{ACTOR}.entropy_coeff": To("train.entropy_coef", number),
    f"{ACTOR}.loss_agg_mode": To("train.aggregation", AGGREGATION),
    f"{ACTOR}.ppo_mini_batch_size": READ,
    f"{ACTOR}.use_dynamic_bsz": READ,
    f"{ACTOR}.ppo_max_token_len_per_gpu": READ,
    f"{ACTOR}.ppo_micro_batch_size*": Without(MICRO),
    f"{ACTOR}.clip_ratio*": READ,
    f"{ACTOR}.policy_loss.*": READ,
    f"{ACTOR}.tau_*": READ,
    f"{ACTOR}.use_kl_loss": READ,
    f"{ACTOR}.kl_loss_*": READ,
    f"{ACTOR}.strategy": READ,
    f"{ACTOR}.shuffle": Without("mini-batches are taken in an order that follows from train.seed"),
    f"{ACTOR}.fsdp_config.param_offload": READ,
    f"{ACTOR}.fsdp_config.optimizer_offload": READ,
    f"{ACTOR}.fsdp_config.*": Without("fabric.strategy: fsdp2 shards over all ranks; FSDP2 has its options"),
    f"{ACTOR}.ulysses_sequence_parallel_size": Without("rlkit divides no sequence; fabric.strategy.tensor_parallel"),
    f"{ACTOR}.megatron.*": Without(MEGATRON),
    f"{ACTOR}.checkpoint.*": Without("nothing to do: a checkpoint holds all that a run needs to go on"),
    f"{ACTOR}.use_torch_compile": Without("nothing to do: the trainer is not compiled"),
    f"{ACTOR}.entropy_*": Without("nothing to do: entropy is computed in slices"),
    f"{ACTOR}.use_token_level_loss": Without("an older name: loss_agg_mode=token-mean; false: seq-mean-token-mean"),
    f"{ACTOR}.kl_loss.*": Without("another version's name of kl_loss_coef and kl_loss_type; give those after the file"),
    "algorithm.in_reward_kl.*": Without(
        "another version's name of use_kl_in_reward, kl_ctrl; give those after the file"
    ),
    f"{ACTOR}.loss_scale_factor": Without("aggregation seq_mean_token_sum_norm divides by rollout.sampling.max_tokens"),
    f"{REF}.fsdp_config.*": Without(OFFLOAD),
    f"{REF}.log_prob_*": Without(MICRO),
    f"{REF}.strategy": Without("the reference is sharded as the policy is"),
    f"{REF}.ulysses_sequence_parallel_size": Without("rlkit divides no sequence"),
    f"{REF}.megatron.*": Without(MEGATRON),
    f"{ROLLOUT}.n": To("rollout.group_size", whole),
    f"{ROLLOUT}.temperature": To("rollout.sampling.temperature", number),
    f"{ROLLOUT}.top_p": To("rollout.sampling.top_p", unlimited(1)),
    f"{ROLLOUT}.top_k": To("rollout.sampling.top_k", lambda value: int(unlimited(0, -1)(value))),
    f"{ROLLOUT}.name": READ,
    f"{ROLLOUT}.tensor_model_parallel_size": READ,
    f"{ROLLOUT}.free_cache_engine": READ,
    f"{ROLLOUT}.val_kwargs.*": READ,
    f"{ROLLOUT}.response_length": To("rollout.sampling.max_tokens", whole),
    f"{ROLLOUT}.prompt_length": To("rollout.max_prompt_tokens", whole),
    f"{ROLLOUT}.mode": Without("nothing to do: conversations are always independent of one another"),
    f"{ROLLOUT}.gpu_memory_utilization": Without(
        "rollout.engine.launch.memory_fraction is the share of what is free when a server starts, 0.4 by default"
    ),
    f"{ROLLOUT}.log_prob_*": Without(MICRO),
    f"{ROLLOUT}.calculate_log_probs": Without("nothing to do: the engine's log-probs are always kept and compared"),
    f"{ROLLOUT}.do_sample": Without("training always samples"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": READ,
    f"{ROLLOUT}.multi_turn.enable": Without("a conversation has several turns where the recipe has tools"),
    f"{ROLLOUT}.multi_turn.tool_config_path": Without("name the tools under `tools:`; see rlkit docs tools"),
    f"{ROLLOUT}.multi_turn.interaction_config_path": Without("interaction: InteractionRouter, or one of a plugin"),
    f"{ROLLOUT}.multi_turn.format": Without("nothing to do: the parser is found out from the chat template"),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": Without("conversation.max_reply_tokens counts tokens"),
    f"{ROLLOUT}.multi_turn.*": Without("see the section `conversation:`"),
    f"{ROLLOUT}.agent.*": Without("tools, interaction or environment; see rlkit docs tools"),
    **{
        f"{ROLLOUT}.{name}": Without(SERVER)
        for name in (
            "enforce_eager",
            "max_num_batched_tokens",
            "max_num_seqs",
            "max_model_len",
            "enable_chunked_prefill",
            "dtype",
            "load_format",
            "engine_kwargs.*",
            "disable_log_stats",
            "layered_summon",
            "ignore_eos",
        )
    },
    "actor_rollout_ref.hybrid_engine": Without("nothing to do: SGLangEngine shares the trainer's GPUs"),
    "actor_rollout_ref.nccl_timeout": Without("train.deadline is how long a rank waits for the others"),
    "critic.optim.lr": READ,
    "critic.optim.*": READ,
    "critic.model.path": READ,
    "critic.grad_clip": READ,
    "critic.cliprange_value": READ,
    "critic.model.enable_gradient_checkpointing": Without("train.checkpoint_activations holds for the critic too"),
    "critic.model.use_remove_padding": Without(PADDING),
    "critic.model.fsdp_config.*": Without(OFFLOAD),
    "critic.ppo_micro_batch_size*": Without(MICRO),
    "critic.forward_*": Without(MICRO),
    "critic.use_dynamic_bsz": Without(MICRO),
    "critic.ppo_max_token_len_per_gpu": Without(MICRO),
    "critic.ppo_mini_batch_size": Without(ONE_BATCH),
    "critic.ppo_epochs": Without(ONE_BATCH),
    "reward_model.*": READ,
    "custom_reward_function.*": READ,
    "algorithm.adv_estimator": READ,
    "algorithm.gamma": READ,
    "algorithm.lam": READ,
    "algorithm.norm_adv_by_std_in_grpo": READ,
    "algorithm.use_kl_in_reward": READ,
    "algorithm.kl_penalty": READ,
    "algorithm.kl_ctrl.*": READ,
    "algorithm.filter_groups.*": READ,
    "algorithm.use_pf_ppo": Without("rlkit has no preference feedback PPO"),
    "algorithm.pf_ppo.*": Without("rlkit has no preference feedback PPO"),
    f"{ACTOR}.tis_imp_ratio_cap": READ,
    "algorithm.rollout_correction.rollout_is": READ,
    "algorithm.rollout_correction.rollout_is_threshold": READ,
    "algorithm.rollout_*": Without("see the sections `correction:` and `rejection:`"),
    "trainer.total_training_steps": To("train.steps", whole),
    "trainer.total_epochs": READ,
    "trainer.save_freq": To("save.every", interval),
    "trainer.max_actor_ckpt_to_keep": To("save.keep_last", whole),
    "trainer.max_critic_ckpt_to_keep": Without("save.keep_last keeps whole checkpoints, the critic's part included"),
    "trainer.test_freq": To("validation.every", interval),
    "trainer.val_before_train": To("validation.before", flag),
    "trainer.n_gpus_per_node": To("fabric.devices", whole),
    "trainer.nnodes": To("fabric.num_nodes", whole),
    "trainer.critic_warmup": READ,
    "trainer.logger": READ,
    "trainer.project_name": READ,
    "trainer.experiment_name": READ,
    "trainer.val_only": Without("rlkit validate"),
    "trainer.resume_*": Without("rlkit fit --resume RUN, or --resume auto with --out"),
    "trainer.default_local_dir": Without("rlkit fit --out FOLDER; save.folder for checkpoints alone"),
    "trainer.default_hdfs_dir": Without("save.folder may be any URL that fsspec opens"),
    "trainer.log_val_generations": Without("nothing to do: all validation answers are kept in rollouts/"),
    "trainer.rollout_data_dir": Without("nothing to do: rollouts are kept in the run folder; log.rollouts"),
    "trainer.validation_data_dir": Without("nothing to do: all validation answers are kept in rollouts/"),
    "trainer.balance_batch": Without("nothing to do: groups are always divided among ranks by their tokens"),
    "trainer.device": Without("fabric.accelerator"),
    "trainer.ray_*": Without(RAY),
    "ray_*": Without(RAY),
    "defaults": Without("verl's own defaults are assumed; convert a file that this one builds on, too"),
    "--config-name": Without("its file sets more options; convert it with these options after it"),
    "--config-path": Without("its file sets more options; convert it with these options after it"),
    "data.apply_chat_template_kwargs.*": READ,
    "critic.model.lora_*": READ,
    "critic.model.target_modules": READ,
    f"{ROLLOUT}.over_sample_rate": To("rollout.oversample", lambda rate: round(1 + number(rate), 9)),
    **{name: Without(remedy) for names, remedy in OTHERS.items() for name in names.split()},
}

OPTION = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+|data|defaults)=")


def read(content: str, name: str, more: list[str]) -> Given:
    """Return the options of a YAML file or of the commands of a shell script, with more of them after it."""
    if name.lower().endswith((".yaml", ".yml")):
        given = of_yaml(content, name, nested=True)
        words = more
    else:
        given = Given()
        words = [*(word for line in lines_of(content, name) for word in line), *more]
    for word in words:
        key, _, value = word.partition("=")
        if (found := OPTION.match(word)) is not None:
            given.add(found[1], value)
        elif key in ("--config-name", "--config-path") and value:
            given.add(key, value)
    return given
