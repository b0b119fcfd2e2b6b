"""verl's options (of `verl.trainer.main_ppo`), and the rule of each."""

from __future__ import annotations

import re

from rlkit_convert.conversion import (
    COMBINED,
    Equivalent,
    NoEquivalent,
    Rule,
    boolean,
    choice,
    integer,
    number,
    text,
)
from rlkit_convert.shell import commands
from rlkit_convert.source import PeerOptions, read_yaml

MODEL = "actor_rollout_ref.model"
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REF = "actor_rollout_ref.ref"

MICRO = "nothing to do: train.max_tokens_per_micro_batch bounds memory (default: auto), and the gradient is the same"
RAY = "nothing to do: rlkit needs no Ray; on a cluster of Ray, see `rlkit docs clusters`"
PADDING = "nothing to do: padding is removed if the model allows it"
SERVER = "an argument of the engine; SGLang's belong in rollout.engine.launch.args"
OFFLOAD = "train.offload_during_rollout covers it"
ONE_BATCH = "the critic trains on the policy's mini-batches"
LOGPS = "nothing to do: log-probs are computed in slices without it"
MEGATRON = "rlkit shards with FSDP2: fabric.strategy"

DEFAULTS: dict[str, object] = {
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": 0.1,
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

AGGREGATION = choice({
    "token-mean": "token_mean", "seq-mean-token-sum": "seq_mean_token_sum",
    "seq-mean-token-mean": "seq_mean_token_mean",
    "seq-mean-token-sum-norm": "seq_mean_token_sum_norm", "token-sum": "token_sum",
})  # fmt: skip
ESTIMATORS = choice({
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
    """Return an interval in steps; 0 means never, for which verl has -1."""
    return max(integer(value), 0)


def has_optimizer(contents: object) -> bool:
    """Check whether verl's contents of a checkpoint include optimizers.

    Raises:
        ValueError: They are no list.
    """
    if not isinstance(contents, list):
        raise ValueError("expected a list such as [model, optimizer, extra]")
    return "optimizer" in contents


GROUPED = {
    "actor_rollout_ref.actor.use_remove_padding critic.use_remove_padding": PADDING,
    "actor_rollout_ref.actor.use_fused_kernels actor_rollout_ref.model.fused_kernel_options.*": LOGPS,
    "*.profiler.* global_profiler.*": "profile.steps writes traces of single steps to the run folder",
    "actor_rollout_ref.ref.use_torch_compile": "nothing to do: the trainer is not compiled",
    "actor_rollout_ref.ref.model*": "the reference is the initial policy; the section `reference:` lets it follow",
    "actor_rollout_ref.ref.entropy_*": "nothing to do: the reference computes no entropy",
    f"{ROLLOUT}.cudagraph_* {ROLLOUT}.update_weights_*": SERVER,
    f"{ROLLOUT}.multi_stage_wake_up": "nothing to do: engines order their own allocations",
    f"{ROLLOUT}.trace.*": "nothing to do: rollouts are saved token by token; rlkit report shows them",
    f"{ROLLOUT}.skip_*": "rlkit replay RUN --step N --phase learn trains on saved rollouts",
    f"{MODEL}.custom_chat_template": "put the template in the model's folder",
    f"{MODEL}.enable_activation_offload critic.model.enable_activation_offload": "train.offload_activations",
    f"{MODEL}.exclude_modules": "model.lora.targets names the modules with adapters",
    "data.tokenizer": "nothing to do: the model's own tokenizer is used",
    "*.use_shm": "nothing to do: files are read in place",
    "data.return_*": "nothing to do: messages are always kept",
    "data.validation_shuffle": "nothing to do: all validation prompts are sampled",
    "data.video_key": "the task Verl reads the column `videos` as frames; rename yours",
    "data.datagen.*": "write a task as a plugin: rlkit plugins new NAME --kind task",
    "critic.rollout_n critic.enable critic.shuffle": "nothing to do: the critic trains on the policy's batches",
    "critic.strategy critic.ulysses_*": "the critic is sharded like the policy: fabric.strategy",
    "critic.loss_agg_mode": "the critic's loss is the mean over all tokens",
    "critic.checkpoint.*": "nothing to do: a checkpoint also holds the critic; save.optimizer applies to both",
    "critic.model.tokenizer_path critic.model.external_lib": "nothing to do: the critic uses the policy's tokenizer",
    "critic.model.override_config.*": "the critic has the values of model.config if critic.path is null",
    "critic.model.trust_remote_code": "model.trust_remote_code also applies to the critic",
    "trainer.esi_redundant_time": "nothing to do: a signal saves a checkpoint",
    "trainer.del_local_*": "nothing to do: save.keep_last removes a loaded checkpoint once a newer one is complete",
    "trainer.use_legacy_worker_impl": RAY,
}
"""Remedies for groups of options."""

RULES: dict[str, Rule] = {
    "*_target_": NoEquivalent("nothing to do: verl's own bookkeeping"),
    "data.train_files": Equivalent("task.path"),
    "data.val_files": Equivalent("task.validation_path"),
    "data.train_batch_size": Equivalent("train.prompts_per_step", integer),
    "data.max_prompt_length": Equivalent("rollout.max_prompt_tokens", integer),
    "data.max_response_length": Equivalent("rollout.sampling.max_tokens", integer),
    "data.seed": Equivalent("train.seed", integer),
    "data.truncation": COMBINED,
    "data.filter_overlong_prompts": COMBINED,
    "data.train_max_samples": COMBINED,
    "data.trust_remote_code": Equivalent("model.trust_remote_code", boolean),
    "data.prompt_key": COMBINED,
    "data.reward_fn_key": NoEquivalent("the task Verl reads the column `data_source`; rename yours"),
    "data.shuffle": COMBINED,
    "data.val_batch_size": NoEquivalent("nothing to do: all validation prompts are sampled together"),
    "data.gen_batch_size": NoEquivalent("rollout.oversample starts more prompts than a step trains on"),
    "data.filter_overlong_prompts_workers": NoEquivalent("nothing to do: prompts are tokenised on all CPUs"),
    "data.dataloader_num_workers": NoEquivalent("nothing to do: rows are read in the run's process"),
    "data.custom_cls.*": NoEquivalent("write a task as a plugin: rlkit plugins new NAME --kind task"),
    "data.sampler.*": NoEquivalent("curriculum: Difficulty, SuccessRate, or one from a plugin"),
    "data.image_key": NoEquivalent("the task Verl reads the column `images`; rename yours"),
    f"{MODEL}.path": Equivalent("model.path", text),
    f"{MODEL}.trust_remote_code": Equivalent("model.trust_remote_code", boolean),
    f"{MODEL}.enable_gradient_checkpointing": Equivalent("train.checkpoint_activations", boolean),
    f"{MODEL}.lora_rank": COMBINED,
    f"{MODEL}.lora_alpha": COMBINED,
    f"{MODEL}.target_modules": COMBINED,
    f"{MODEL}.use_remove_padding": NoEquivalent(PADDING),
    f"{MODEL}.use_shm": NoEquivalent("nothing to do: models are read in place"),
    f"{MODEL}.external_lib": NoEquivalent("make your code a plugin: rlkit plugins new NAME"),
    f"{MODEL}.use_liger": NoEquivalent(LOGPS),
    f"{MODEL}.use_fused_kernels": NoEquivalent(LOGPS),
    f"{MODEL}.override_config.*": COMBINED,
    f"{ACTOR}.optim.lr": Equivalent("train.lr", number),
    f"{ACTOR}.optim.weight_decay": Equivalent("train.weight_decay", number),
    f"{ACTOR}.optim.betas": Equivalent("train.optimizer.betas"),
    f"{ACTOR}.optim.*": COMBINED,
    f"{ACTOR}.grad_clip": Equivalent("train.max_grad_norm", number),
    f"{ACTOR}.ppo_epochs": Equivalent("train.epochs", integer),
    f"{ACTOR}.entropy_coeff": Equivalent("train.entropy_coef", number),
    f"{ACTOR}.loss_agg_mode": Equivalent("train.aggregation", AGGREGATION),
    f"{ACTOR}.ppo_mini_batch_size": COMBINED,
    f"{ACTOR}.use_dynamic_bsz": COMBINED,
    f"{ACTOR}.ppo_max_token_len_per_gpu": COMBINED,
    f"{ACTOR}.ppo_micro_batch_size*": NoEquivalent(MICRO),
    f"{ACTOR}.clip_ratio*": COMBINED,
    f"{ACTOR}.policy_loss.*": COMBINED,
    f"{ACTOR}.tau_*": COMBINED,
    f"{ACTOR}.use_kl_loss": COMBINED,
    f"{ACTOR}.kl_loss_*": COMBINED,
    f"{ACTOR}.strategy": COMBINED,
    f"{ACTOR}.shuffle": NoEquivalent("train.seed determines the order of mini-batches"),
    f"{ACTOR}.fsdp_config.param_offload": COMBINED,
    f"{ACTOR}.fsdp_config.optimizer_offload": COMBINED,
    f"{ACTOR}.fsdp_config.*": NoEquivalent("fabric.strategy: fsdp2 shards over all ranks; see the options of FSDP2"),
    f"{ACTOR}.ulysses_sequence_parallel_size": COMBINED,
    f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff": Equivalent(
        "train.router_aux_loss_coef", number
    ),
    f"{ACTOR}.megatron.*": NoEquivalent(MEGATRON),
    f"{ACTOR}.checkpoint.save_contents": Equivalent("save.optimizer", has_optimizer),
    f"{ACTOR}.checkpoint.load_contents": NoEquivalent(
        "a run resumes from all that its checkpoint holds; model.path: CHECKPOINT starts from its weights alone"
    ),
    f"{ACTOR}.checkpoint.*": NoEquivalent("nothing to do: checkpoints are written while the run continues"),
    f"{ACTOR}.use_torch_compile": NoEquivalent("nothing to do: the trainer is not compiled"),
    f"{ACTOR}.entropy_*": NoEquivalent("nothing to do: entropy is computed in slices"),
    f"{ACTOR}.use_token_level_loss": NoEquivalent("older name of loss_agg_mode=token-mean; false: seq-mean-token-mean"),
    f"{ACTOR}.kl_loss.*": NoEquivalent("another version's name of kl_loss_coef, kl_loss_type; set those instead"),
    "algorithm.in_reward_kl.*": NoEquivalent("another version's name of use_kl_in_reward, kl_ctrl; set those instead"),
    f"{ACTOR}.loss_scale_factor": NoEquivalent("seq_mean_token_sum_norm divides by rollout.sampling.max_tokens"),
    f"{REF}.fsdp_config.*": NoEquivalent(OFFLOAD),
    f"{REF}.log_prob_*": NoEquivalent(MICRO),
    f"{REF}.strategy": NoEquivalent("the reference is sharded like the policy"),
    f"{REF}.ulysses_sequence_parallel_size": NoEquivalent("the reference is divided like the policy"),
    f"{REF}.megatron.*": NoEquivalent(MEGATRON),
    f"{ROLLOUT}.n": Equivalent("rollout.group_size", integer),
    f"{ROLLOUT}.temperature": Equivalent("rollout.sampling.temperature", number),
    f"{ROLLOUT}.top_p": COMBINED,
    f"{ROLLOUT}.top_k": COMBINED,
    f"{ROLLOUT}.name": COMBINED,
    f"{ROLLOUT}.tensor_model_parallel_size": COMBINED,
    f"{ROLLOUT}.free_cache_engine": COMBINED,
    f"{ROLLOUT}.val_kwargs.*": COMBINED,
    f"{ROLLOUT}.response_length": Equivalent("rollout.sampling.max_tokens", integer),
    f"{ROLLOUT}.prompt_length": Equivalent("rollout.max_prompt_tokens", integer),
    f"{ROLLOUT}.mode": NoEquivalent("nothing to do: conversations are always independent"),
    f"{ROLLOUT}.gpu_memory_utilization": NoEquivalent(
        "rollout.engine.launch.memory_fraction is the fraction of free memory when a server starts (default: 0.4)"
    ),
    f"{ROLLOUT}.log_prob_*": NoEquivalent(MICRO),
    f"{ROLLOUT}.calculate_log_probs": NoEquivalent("nothing to do: the engine's log-probs are always compared"),
    f"{ROLLOUT}.do_sample": NoEquivalent("training always samples"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": COMBINED,
    f"{ROLLOUT}.multi_turn.enable": NoEquivalent("a conversation has several turns if the recipe has tools"),
    f"{ROLLOUT}.multi_turn.tool_config_path": COMBINED,
    f"{ROLLOUT}.multi_turn.interaction_config_path": COMBINED,
    f"{ROLLOUT}.multi_turn.format": NoEquivalent("nothing to do: the parser is detected from the chat template"),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": NoEquivalent("conversation.max_reply_tokens counts tokens"),
    f"{ROLLOUT}.multi_turn.*": NoEquivalent("see the section `conversation:`"),
    f"{ROLLOUT}.agent.*": NoEquivalent("tools, interaction or environment; see rlkit docs tools"),
    **{
        f"{ROLLOUT}.{name}": NoEquivalent(SERVER)
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
    "actor_rollout_ref.hybrid_engine": NoEquivalent("nothing to do: SGLangEngine shares the trainer's GPUs"),
    "actor_rollout_ref.nccl_timeout": NoEquivalent("train.deadline is how long a rank waits for its peers"),
    "critic.optim.lr": COMBINED,
    "critic.optim.*": COMBINED,
    "critic.model.path": COMBINED,
    "critic.grad_clip": COMBINED,
    "critic.cliprange_value": COMBINED,
    "critic.model.enable_gradient_checkpointing": NoEquivalent(
        "train.checkpoint_activations also applies to the critic"
    ),
    "critic.model.use_remove_padding": NoEquivalent(PADDING),
    "critic.model.fsdp_config.*": NoEquivalent(OFFLOAD),
    "critic.ppo_micro_batch_size*": NoEquivalent(MICRO),
    "critic.forward_*": NoEquivalent(MICRO),
    "critic.use_dynamic_bsz": NoEquivalent(MICRO),
    "critic.ppo_max_token_len_per_gpu": NoEquivalent(MICRO),
    "critic.ppo_mini_batch_size": NoEquivalent(ONE_BATCH),
    "critic.ppo_epochs": NoEquivalent(ONE_BATCH),
    "reward_model.*": COMBINED,
    "*sandbox_fusion.*": COMBINED,
    "custom_reward_function.*": COMBINED,
    "algorithm.adv_estimator": COMBINED,
    "algorithm.gamma": COMBINED,
    "algorithm.lam": COMBINED,
    "algorithm.norm_adv_by_std_in_grpo": COMBINED,
    "algorithm.use_kl_in_reward": COMBINED,
    "algorithm.kl_penalty": COMBINED,
    "algorithm.kl_ctrl.*": COMBINED,
    "algorithm.filter_groups.*": COMBINED,
    "algorithm.use_pf_ppo": NoEquivalent("rlkit has no preference-feedback PPO"),
    "algorithm.pf_ppo.*": NoEquivalent("rlkit has no preference-feedback PPO"),
    f"{ACTOR}.tis_imp_ratio_cap": COMBINED,
    "algorithm.rollout_correction.rollout_is": COMBINED,
    "algorithm.rollout_correction.rollout_is_threshold": COMBINED,
    "algorithm.rollout_*": NoEquivalent("see the sections `correction:` and `rejection:`"),
    "trainer.total_training_steps": Equivalent("train.steps", integer),
    "trainer.total_epochs": COMBINED,
    "trainer.save_freq": Equivalent("save.every", interval),
    "trainer.max_actor_ckpt_to_keep": Equivalent("save.keep_last", integer),
    "trainer.max_critic_ckpt_to_keep": NoEquivalent("save.keep_last counts checkpoints, which include the critic"),
    "trainer.test_freq": Equivalent("validation.every", interval),
    "trainer.val_before_train": Equivalent("validation.before", boolean),
    "trainer.n_gpus_per_node": Equivalent("fabric.devices", integer),
    "trainer.nnodes": Equivalent("fabric.num_nodes", integer),
    "trainer.critic_warmup": COMBINED,
    "trainer.logger": COMBINED,
    "trainer.project_name": COMBINED,
    "trainer.experiment_name": COMBINED,
    "trainer.val_only": NoEquivalent("rlkit validate"),
    "trainer.resume_*": NoEquivalent("rlkit fit --resume RUN, or --resume auto with --out"),
    "trainer.default_local_dir": NoEquivalent("rlkit fit --out FOLDER; save.folder for checkpoints alone"),
    "trainer.default_hdfs_dir": NoEquivalent("save.folder may be any URL that fsspec opens"),
    "trainer.log_val_generations": NoEquivalent("nothing to do: all validation completions are saved in rollouts/"),
    "trainer.rollout_data_dir": NoEquivalent("nothing to do: rollouts are saved in the run folder; log.rollouts"),
    "trainer.validation_data_dir": NoEquivalent("nothing to do: all validation completions are saved in rollouts/"),
    "trainer.balance_batch": NoEquivalent("nothing to do: groups are always divided among ranks by their tokens"),
    "trainer.device": NoEquivalent("fabric.accelerator"),
    "trainer.ray_*": NoEquivalent(RAY),
    "ray_*": NoEquivalent(RAY),
    "defaults": NoEquivalent("verl's own defaults are assumed; also convert the file that this one builds on"),
    "--config-name": NoEquivalent("its file sets more options; convert that file, with these options after it"),
    "--config-path": NoEquivalent("its file sets more options; convert that file, with these options after it"),
    "data.apply_chat_template_kwargs.*": COMBINED,
    "critic.model.lora_*": COMBINED,
    "critic.model.target_modules": COMBINED,
    f"{ROLLOUT}.over_sample_rate": Equivalent("rollout.oversample", lambda rate: round(1 + number(rate), 9)),
    **{name: NoEquivalent(remedy) for names, remedy in GROUPED.items() for name in names.split()},
}

OPTION = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+|data|defaults)=")


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of a YAML file or of the commands in a shell script, followed by the overrides."""
    if name.lower().endswith((".yaml", ".yml")):
        options = read_yaml(content, name, nested=True)
        words = overrides
    else:
        options = PeerOptions()
        words = [*(word for command in commands(content, name) for word in command), *overrides]
    for word in words:
        key, _, value = word.partition("=")
        option = OPTION.match(word)
        if option is not None:
            options.add(option[1], value)
        elif key in ("--config-name", "--config-path") and value:
            options.add(key, value)
    return options
