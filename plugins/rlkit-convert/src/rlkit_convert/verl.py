"""verl's options (of `verl.trainer.main_ppo`), and the rule of each.

`verl_method` has those that change what is trained and have no equivalent, `verl_runtime` those of hardware and files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlkit_convert import verl_method, verl_runtime
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
from rlkit_convert.source import MARK, PeerOptions, read_text, read_yaml
from rlkit_convert.verl_runtime import ACTOR, MODEL, ROLLOUT

ADAPTER_OPTIONS = (
    "lora_rank", "lora_alpha", "target_modules", "lora.rank", "lora.alpha", "lora.target_modules", "lora.type",
)  # fmt: skip
SCHEDULE_OPTIONS = (
    "lr_warmup_steps", "lr_warmup_steps_ratio", "lr_scheduler_type", "warmup_style", "lr_decay_style", "min_lr_ratio",
    "num_cycles",
)  # fmt: skip
CORRECTION_OPTIONS = (
    "rollout_is", "rollout_is_threshold", "rollout_rs", "rollout_rs_threshold", "rollout_rs_threshold_lower",
    "bypass_mode",
)  # fmt: skip
TURN_OPTIONS = ("enable", "max_assistant_turns", "max_user_turns", "tool_config_path", "interaction_config_path")

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


def token_level(value: object) -> str:
    """Return the aggregation that an older version switched."""
    return "token_mean" if boolean(value) else "seq_mean_token_mean"


def has_optimizer(contents: object) -> bool:
    """Check whether verl's contents of a checkpoint include optimizers.

    Raises:
        ValueError: They are no list.
    """
    if not isinstance(contents, list):
        raise ValueError("expected a list such as [model, optimizer, extra]")
    return "optimizer" in contents


RULES: dict[str, Rule] = {
    "*_target_": NoEquivalent("nothing to do: verl's own bookkeeping"),
    f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff": Equivalent(
        "train.router_aux_loss_coef", number
    ),
    **verl_method.RULES,
    "data.train_files": Equivalent("task.path"),
    "data.val_files": Equivalent("task.validation_path"),
    "data.train_batch_size": Equivalent("train.prompts_per_step", integer),
    "data.gen_batch_size": COMBINED,
    "data.max_prompt_length": Equivalent("rollout.max_prompt_tokens", integer),
    "data.max_response_length": Equivalent("rollout.sampling.max_tokens", integer),
    "data.seed": Equivalent("train.seed", integer),
    "data.truncation": COMBINED,
    "data.filter_overlong_prompts": COMBINED,
    "data.train_max_samples": COMBINED,
    "data.val_max_samples": COMBINED,
    "data.trust_remote_code": Equivalent("model.trust_remote_code", boolean),
    "data.apply_chat_template_kwargs.*": COMBINED,
    f"{MODEL}.path": Equivalent("model.path", text),
    f"{MODEL}.trust_remote_code": Equivalent("model.trust_remote_code", boolean),
    f"{MODEL}.custom_chat_template": Equivalent("model.chat_template", text),
    f"{MODEL}.enable_gradient_checkpointing": Equivalent("train.checkpoint_activations", boolean),
    **{f"{prefix}.{name}": COMBINED for prefix in (MODEL, "critic.model") for name in ADAPTER_OPTIONS},
    f"{MODEL}.override_config.*": COMBINED,
    f"{ACTOR}.freeze_vision_tower": Equivalent("model.vision.train", lambda frozen: not boolean(frozen)),
    f"{ACTOR}.optim.lr": Equivalent("train.lr", number),
    f"{ACTOR}.optim.weight_decay": Equivalent("train.weight_decay", number),
    f"{ACTOR}.optim.betas": Equivalent("train.optimizer.betas"),
    "critic.optim.betas": COMBINED,
    "*.optim.lr": COMBINED,
    "*.optim.weight_decay": COMBINED,
    **{f"*.optim.{name}": COMBINED for name in SCHEDULE_OPTIONS},
    f"{ACTOR}.grad_clip": Equivalent("train.max_grad_norm", number),
    f"{ACTOR}.ppo_epochs": Equivalent("train.epochs", integer),
    f"{ACTOR}.entropy_coeff": Equivalent("train.entropy_coef", number),
    f"{ACTOR}.loss_agg_mode": Equivalent("train.aggregation", AGGREGATION),
    f"{ACTOR}.use_token_level_loss": Equivalent("train.aggregation", token_level),
    f"{ACTOR}.ppo_mini_batch_size": COMBINED,
    f"{ACTOR}.use_dynamic_bsz": COMBINED,
    f"{ACTOR}.ppo_max_token_len_per_gpu": COMBINED,
    f"{ACTOR}.clip_ratio*": COMBINED,
    f"{ACTOR}.policy_loss.*": COMBINED,
    f"{ACTOR}.tau_*": COMBINED,
    f"{ACTOR}.use_kl_loss": COMBINED,
    f"{ACTOR}.kl_loss_*": COMBINED,
    f"{ACTOR}.tis_imp_ratio_cap": COMBINED,
    f"{ACTOR}.strategy": COMBINED,
    f"{ACTOR}.fsdp_config.param_offload": COMBINED,
    f"{ACTOR}.fsdp_config.optimizer_offload": COMBINED,
    f"{ACTOR}.ulysses_sequence_parallel_size": COMBINED,
    f"{ACTOR}.checkpoint.save_contents": Equivalent("save.optimizer", has_optimizer),
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
    f"{ROLLOUT}.over_sample_rate": Equivalent("rollout.oversample", lambda rate: round(1 + number(rate), 9)),
    **{f"{ROLLOUT}.multi_turn.{name}": COMBINED for name in TURN_OPTIONS},
    "critic.model.path": COMBINED,
    "critic.grad_clip": COMBINED,
    "critic.cliprange_value": COMBINED,
    "critic.ppo_epochs": COMBINED,
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
    **{f"algorithm.rollout_correction.{name}": COMBINED for name in CORRECTION_OPTIONS},
    "trainer.total_training_steps": Equivalent("train.steps", integer),
    "trainer.total_epochs": COMBINED,
    "trainer.save_freq": Equivalent("save.every", interval),
    "trainer.max_actor_ckpt_to_keep": Equivalent("save.keep_last", integer),
    "trainer.test_freq": Equivalent("validation.every", interval),
    "trainer.val_before_train": Equivalent("validation.before", boolean),
    "trainer.n_gpus_per_node": Equivalent("fabric.devices", integer),
    "trainer.nnodes": Equivalent("fabric.num_nodes", integer),
    "trainer.critic_warmup": COMBINED,
    "trainer.logger": COMBINED,
    "trainer.project_name": COMBINED,
    "trainer.experiment_name": COMBINED,
    **verl_runtime.RULES,
}
"""The rule of each option: first those that change what is trained, in front of patterns of hardware."""

CONFIG = ("--config-name", "--config-path")
OPTION = re.compile(r"[+~]{0,2}([A-Za-z_]\w*(?:\.[\w-]+)+|data|defaults)=")
NEWER_NAMES = {
    "reward.custom_reward_function.": "custom_reward_function.",
    "reward.reward_kwargs.": "reward_model.reward_kwargs.",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model.": "reward_model.",
    "critic.fsdp.": "critic.model.fsdp_config.",
}
"""Beginnings of names of newer versions, and the names that the rules have."""


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of a YAML file or of the commands in a shell script, followed by the overrides.

    A configuration that the commands name is read too, if it is on this machine.
    """
    if name.lower().endswith((".yaml", ".yml")):
        options = read_yaml(content, name, nested=True)
        words = overrides
    else:
        options = PeerOptions()
        words = [*(word for command in commands(content, name) for word in command), *overrides]
    config: dict[str, str] = {}
    for word in words:
        key, _, value = word.partition("=")
        option = OPTION.match(word)
        if option is not None:
            options.add(option[1], value)
        elif key in CONFIG and value:
            config[key] = value
    path = _config_file(config, name)
    if path is not None:
        file = read_yaml(read_text(str(path)), str(path), nested=True)
        file.values.pop("defaults", None)  # verl's own, whose values `DEFAULTS` has
        named = {**options.values, **options.unresolved}
        options.values |= {key: value for key, value in file.values.items() if key not in named}
        options.unresolved |= {key: reason for key, reason in file.unresolved.items() if key not in named}
    else:
        for key, value in config.items():
            options.add(key, value)
    return _with_rules_names(options)


def _config_file(config: Mapping[str, str], name: str) -> Path | None:
    """Return the file that a script names, which is beside it or in the working folder; None if it is on neither."""
    file, folder = config.get("--config-name", ""), config.get("--config-path", "")
    if not file or MARK in file + folder:
        return None
    candidates = [parent / folder / f"{file.removesuffix('.yaml')}.yaml" for parent in (Path(name).parent, Path())]
    return next((path for path in candidates if os.path.isfile(path)), None)


def _with_rules_names(options: PeerOptions) -> PeerOptions:
    """Return the options under the names that the rules have."""
    for table in (options.values, options.unresolved):
        for key in list(table):
            newer = next((begin for begin in NEWER_NAMES if key.startswith(begin)), None)
            if newer is not None:
                older = NEWER_NAMES[newer] + key.removeprefix(newer)
                table[older] = table.pop(key)  # type: ignore[assignment]
                options.names[older] = key
    return options
