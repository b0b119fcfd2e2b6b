"""verl's options (of `verl.trainer.main_ppo`), and the rule of each.

`verl_method` has those that change what is trained and have no equivalent, `verl_runtime` those of hardware and files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from rlkit.base.errors import RecipeError, show
from rlkit_convert import verl_method, verl_runtime
from rlkit_convert.rules import NoEquivalent, Rule, equivalents, read_together
from rlkit_convert.shell import commands
from rlkit_convert.source import MARK, PeerOptions, read_text, read_yaml
from rlkit_convert.values import boolean, choice, integer, number, text, unchanged
from rlkit_convert.verl_runtime import ACTOR, MODEL, ROLLOUT

ADAPTERS = "lora_rank lora_alpha target_modules lora.rank lora.alpha lora.target_modules lora.type"
DEFAULTS: dict[str, object] = {
    f"{ACTOR}.clip_ratio_c": 3.0, f"{ACTOR}.loss_agg_mode": "token-mean", f"{ACTOR}.policy_loss.ppo_kl_coef": 0.1,
    f"{ACTOR}.optim.weight_decay": 0.01, "algorithm.adv_estimator": "gae", "data.max_prompt_length": 512,
    "data.max_response_length": 512, "data.train_batch_size": 1024, f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ROLLOUT}.n": 1, "trainer.save_freq": -1, "trainer.test_freq": -1, "trainer.n_gpus_per_node": 8,
    f"{MODEL}.enable_gradient_checkpointing": True,
}  # fmt: skip
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
    **equivalents(unchanged, {
        "data.train_files": "task.path", "data.val_files": "task.validation_path",
        f"{ACTOR}.optim.betas": "train.optimizer.betas",
    }),
    **equivalents(text, {f"{MODEL}.path": "model.path", f"{MODEL}.custom_chat_template": "model.chat_template"}),
    **equivalents(boolean, {
        "data.trust_remote_code": "model.trust_remote_code", f"{MODEL}.trust_remote_code": "model.trust_remote_code",
        f"{MODEL}.enable_gradient_checkpointing": "train.checkpoint_activations",
        "trainer.val_before_train": "validation.before",
    }),
    **equivalents(number, {
        f"{ACTOR}.optim.lr": "train.lr", f"{ACTOR}.optim.weight_decay": "train.weight_decay",
        f"{ACTOR}.grad_clip": "train.max_grad_norm", f"{ACTOR}.entropy_coeff": "train.entropy_coef",
        f"{ACTOR}.megatron.override_transformer_config.moe_aux_loss_coeff": "train.router_aux_loss_coef",
        f"{ROLLOUT}.temperature": "rollout.sampling.temperature",
    }),
    **equivalents(integer, {
        "data.train_batch_size": "train.prompts_per_step", "data.max_prompt_length": "rollout.max_prompt_tokens",
        "data.max_response_length": "rollout.sampling.max_tokens", "data.seed": "train.seed",
        f"{ACTOR}.ppo_epochs": "train.epochs", f"{ROLLOUT}.n": "rollout.group_size",
        f"{ROLLOUT}.response_length": "rollout.sampling.max_tokens",
        f"{ROLLOUT}.prompt_length": "rollout.max_prompt_tokens", "trainer.total_training_steps": "train.steps",
        "trainer.max_actor_ckpt_to_keep": "save.keep_last", "trainer.n_gpus_per_node": "fabric.devices",
        "trainer.nnodes": "fabric.num_nodes",
    }),
    **equivalents(lambda frozen: not boolean(frozen), {f"{ACTOR}.freeze_vision_tower": "model.vision.train"}),
    **equivalents(lambda rate: round(1 + number(rate), 9), {f"{ROLLOUT}.over_sample_rate": "rollout.oversample"}),
    **equivalents(AGGREGATION, {f"{ACTOR}.loss_agg_mode": "train.aggregation"}),
    **equivalents(token_level, {f"{ACTOR}.use_token_level_loss": "train.aggregation"}),
    **equivalents(has_optimizer, {f"{ACTOR}.checkpoint.save_contents": "save.optimizer"}),
    **equivalents(interval, {"trainer.save_freq": "save.every", "trainer.test_freq": "validation.every"}),
    **verl_method.RULES,
    **read_together({
        "data.": "gen_batch_size truncation filter_overlong_prompts train_max_samples val_max_samples "
        "apply_chat_template_kwargs.*",
        f"{MODEL}.": f"{ADAPTERS} override_config.*",
        "critic.model.": f"{ADAPTERS} path",
        "critic.": "optim.betas grad_clip cliprange_value ppo_epochs",
        "*.optim.": "lr weight_decay lr_warmup_steps lr_warmup_steps_ratio lr_scheduler_type warmup_style "
        "lr_decay_style min_lr_ratio num_cycles",
        f"{ACTOR}.": "ppo_mini_batch_size use_dynamic_bsz ppo_max_token_len_per_gpu clip_ratio* policy_loss.* tau_* "
        "use_kl_loss kl_loss_* tis_imp_ratio_cap strategy fsdp_config.param_offload fsdp_config.optimizer_offload "
        "ulysses_sequence_parallel_size",
        f"{ROLLOUT}.": "top_p top_k name tensor_model_parallel_size free_cache_engine val_kwargs.* multi_turn.enable "
        "multi_turn.max_assistant_turns multi_turn.max_user_turns multi_turn.tool_config_path "
        "multi_turn.interaction_config_path",
        "": "reward_model.* *sandbox_fusion.* custom_reward_function.*",
        "algorithm.": "adv_estimator gamma lam norm_adv_by_std_in_grpo use_kl_in_reward kl_penalty kl_ctrl.* "
        "filter_groups.*",
        "algorithm.rollout_correction.": "rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold "
        "rollout_rs_threshold_lower bypass_mode",
        "trainer.": "total_epochs critic_warmup logger project_name experiment_name",
    }),
    **verl_runtime.RULES,
}  # fmt: skip
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

    Raises:
        RecipeError: An override is no option of verl.
    """
    for word in overrides:
        if OPTION.match(word) is None and word.partition("=")[0] not in CONFIG:
            raise RecipeError(
                f"{show(word, 100)} is no option of verl, expected one such as trainer.total_epochs=3; to write the "
                "recipe to a file, end the line with `> mine.yaml`"
            )
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
