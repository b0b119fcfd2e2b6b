"""slime's options (of `train.py` and `train_async.py`), and the rule of each."""

from __future__ import annotations

import re

from rlkit_convert import slime_runtime
from rlkit_convert.rules import ByHand, Equivalent, Rule, equivalents, read_together
from rlkit_convert.shell import flags, with_arrays
from rlkit_convert.source import LARGEST, MARK, PeerOptions
from rlkit_convert.values import boolean, integer, number, text

DEFAULTS: dict[str, object] = {
    "n_samples_per_prompt": 1, "actor_num_gpus_per_node": 8, "weight_decay": 0.01, "seed": 1234,
    "lr_decay_style": "linear", "input_key": "input",
}  # fmt: skip
"""slime's defaults, and Megatron's, that differ from rlkit's."""
MAIN = re.compile(r"(?:.*/)?train(?:_async)?\.py")
ASYNCHRONOUS = "train_async.py"
"""The key of the option that steps and rollouts run at once."""
ARCHITECTURE = "nothing to do: a file that is not read here sets the model's architecture, which model.path has"
ELSEWHERE = "the script does not set this array; if another file does, give its options after the file"
UNUSED_ARRAY = "nothing to do: the command does not pass this array"

GENERATE = "an environment, an agent or tools: rlkit docs tools-and-environments"
PLUGIN = "your own code becomes a part of a plugin: rlkit plugins new NAME --kind {}"
FROZEN = "rlkit trains all weights, or adapters alone: model.lora, with targets"
PRECISION = "rlkit trains in fabric.precision: bf16-mixed"
ROLLOUTS = ("slime.rollout.sglang_rollout.generate_rollout",)
CODE: dict[str, Rule] = {
    "custom_generate_function_path": ByHand(GENERATE),
    "rollout_sample_hook_path": ByHand(GENERATE),
    "data_source_path": ByHand(PLUGIN.format("task"), ("slime.rollout.data_source.RolloutDataSourceWithBuffer",)),
    "disable_rollout_global_dataset": ByHand(PLUGIN.format("task")),
    "rollout_buffer_url": ByHand(PLUGIN.format("task")),
    "eval_function_path": ByHand(GENERATE, ROLLOUTS),
    "buffer_filter_path": ByHand(PLUGIN.format("filter")),
    "rollout_sample_filter_path": ByHand("train.mask_truncated, rejection, or rollout.filter: a filter of your own"),
    "rollout_all_samples_process_path": ByHand(PLUGIN.format("callback")),
    "rollout_data_postprocess_path": ByHand(PLUGIN.format("advantage")),
    "custom_reward_post_process_path": ByHand(PLUGIN.format("advantage")),
    "custom_convert_samples_to_train_data_path": ByHand(PLUGIN.format("advantage")),
    "custom_advantage_function_path": ByHand(PLUGIN.format("advantage")),
    "custom_loss_function_path": ByHand(PLUGIN.format("loss")),
    "custom_pg_loss_reducer_function_path": ByHand(
        "train.aggregation: seq_mean_token_sum_norm divides by rollout.sampling.max_tokens, as Dr. GRPO does"
    ),
    "custom_model_provider_path": ByHand("rlkit trains models of transformers: model.path"),
    "custom_megatron_before_*": ByHand(PLUGIN.format("callback")),
    "custom_config_path": ByHand("its file sets more options; give them after this file"),
    "megatron_config_path": ByHand("options of the critic alone, in the section `critic:`"),
    "sglang_config": ByHand("its file sets up models and servers: rlkit docs placement"),
    "eval_config": ByHand("validation.tasks: a task for each data set of its file"),
    "debug_rollout_only": ByHand("rlkit validate samples and scores, and trains nothing"),
    **dict.fromkeys(("load_debug_*", "load_forge_rollout_data"),
                    ByHand("rlkit replay RUN --step N --phase learn trains on saved rollouts")),
}  # fmt: skip
"""Options that name code or a file of the user."""

RULES: dict[str, Rule] = {
    **read_together({
        "": "num_rollout num_epoch global_batch_size num_steps_per_rollout rollout_shuffle rollout_seed rollout_stop "
        "rollout_stop_token_ids rollout_top_p rollout_top_k rollout_max_prompt_len rollout_max_context_len "
        "over_sampling_batch_size dynamic_sampling_filter_path prompt_data input_key label_key apply_chat_template "
        "rollout_function_path advantage_estimator eps_clip eps_clip_high eps_clip_c value_clip kl_coef use_kl_loss "
        "kl_loss_coef kl_loss_type use_unbiased_kl ref_update_interval gamma lambd normalize_advantages "
        "disable_grpo_std_normalization disable_rewards_normalization loss_type calculate_per_token_loss use_tis "
        "tis_clip tis_clip_low custom_tis_function_path use_opsm opsm_delta use_opd opd_type opd_kl_coef "
        "opd_teacher_load opd_teacher_ckpt_step num_critic_only_steps lr_decay_style min_lr lr_warmup_iters "
        "adam_beta1 adam_beta2 rm_type reward_key eval_reward_key rm_url custom_rm_path group_rm "
        "eval_interval eval_prompt_data eval_input_key eval_label_key skip_eval_before_train n_samples_per_eval_prompt "
        "eval_temperature eval_top_p eval_top_k eval_max_response_len colocate rollout_num_gpus "
        "rollout_num_gpus_per_engine update_weights_interval use_wandb wandb_project wandb_group wandb_team "
        f"use_tensorboard load {ASYNCHRONOUS}",
    }),
    **equivalents(text, {"hf_checkpoint": "model.path"}),
    **equivalents(integer, {
        "rollout_batch_size": "train.prompts_per_step", "n_samples_per_prompt": "rollout.group_size",
        "rollout_max_response_len": "rollout.sampling.max_tokens", "save_interval": "save.every",
        "actor_num_nodes": "fabric.num_nodes", "actor_num_gpus_per_node": "fabric.devices", "seed": "train.seed",
    }),
    **equivalents(number, {
        "lr": "train.lr", "weight_decay": "train.weight_decay", "adam_eps": "train.optimizer.eps",
        "lr_warmup_fraction": "train.warmup_ratio", "entropy_coef": "train.entropy_coef",
        "rollout_temperature": "rollout.sampling.temperature", "moe_aux_loss_coeff": "train.router_aux_loss_coef",
    }),
    "clip_grad": Equivalent("train.max_grad_norm", lambda value: number(value) or LARGEST),  # 0 is no bound
    "no_save_optim": Equivalent("save.optimizer", lambda value: not boolean(value)),
    "recompute_granularity": Equivalent("train.checkpoint_activations", lambda value: text(value) == "full"),
    "use_rollout_logprobs": Equivalent("train.old_logps", lambda on: "rollout" if boolean(on) else "recompute"),
    "use_rollout_routing_replay": Equivalent("train.router_replay", boolean),
    "apply_chat_template_kwargs": Equivalent("model.chat_template_kwargs"),
    "use_routing_replay": ByHand("train.router_replay: true replays the experts that the engine selected"),
    "multimodal_keys": ByHand("the task HFDataset reads the column `images`; rename yours", ({"image": "images"},)),
    "tool_key": ByHand("rows name tools in the column `tools`; rename yours", ("tools",)),
    "eval_tool_key": ByHand("rows name tools in the column `tools`; rename yours", ("tools",)),
    "partial_rollout": ByHand("rollout.max_staleness: 1 lets unfinished completions continue with new weights"),
    "mask_offpolicy_in_partial_rollout": ByHand("rlkit weighs tokens of older weights: `correction:`, or `rejection:`"),
    "keep_old_actor": ByHand("train.old_logps: rollout has the log-probs of the weights that sampled"),
    "eval_min_new_tokens": ByHand("rlkit has none"),
    "optimizer": ByHand("train.optimizer: AdamW, AdamW8bit, Muon or TorchOptimizer, with its options", ("adam",)),
    "reset_optimizer_states": ByHand("rlkit keeps the optimizer's moments from step to step"),
    "use_stateless_adam": ByHand("rlkit keeps the optimizer's moments from step to step"),
    "decoupled_lr": ByHand("rlkit has one learning rate"),
    "lr_warmup_init": ByHand("a warm-up starts at 0", (0, 0.0)),
    **dict.fromkeys(("lr_warmup_samples", "lr_decay_iters", "lr_decay_samples"),
                    ByHand("train.warmup_steps counts steps, and a schedule ends with train.steps")),
    "lr_wsd_decay_*": ByHand("train.schedule: WarmupStableDecay, with decay_share and decay"),
    **dict.fromkeys(("start_weight_decay", "end_weight_decay"), ByHand("train.weight_decay is constant")),
    "weight_decay_incr_style": ByHand("train.weight_decay is constant", ("constant",)),
    **dict.fromkeys(("only_train_params_name_list", "freeze_params_name_list", "freeze_indexer"), ByHand(FROZEN)),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), ByHand("rlkit trains without dropout", (0, 0.0))),
    "moe_router_load_balancing_type": ByHand(
        "train.router_aux_loss_coef: 0 switches the loss off", ("aux_loss", "seq_aux_loss")
    ),
    "moe_router_bias_update_rate": ByHand("rlkit keeps the biases of routers as they are", (0, 0.0)),
    "moe_z_loss_coeff": ByHand("rlkit has the load-balancing loss alone: train.router_aux_loss_coef"),
    "enable_mtp_training": ByHand("rlkit does not train or use heads that predict several tokens"),
    **dict.fromkeys(("fp16", "fp8_*", "fp4_*"), ByHand(PRECISION)),
    **CODE,
    **slime_runtime.RULES,
}  # fmt: skip
"""The rule of each option: first those that change what is trained, in front of patterns of hardware."""


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of the commands that run slime, with those of arrays that they pass; then the overrides."""
    options = PeerOptions()
    script = with_arrays(content, name)
    for words in script.commands:
        mains = [index for index, word in enumerate(words) if MAIN.fullmatch(word)]
        if mains:
            if words[mains[-1]].endswith(ASYNCHRONOUS):
                options.values[ASYNCHRONOUS] = True
            _add(options, words[mains[-1] + 1 :])
    _add(options, overrides)
    if options.values or options.unresolved:
        missing = {array: ARCHITECTURE if array.startswith("MODEL") else ELSEWHERE for array in script.missing}
        options.remarks |= missing | dict.fromkeys(script.unused, UNUSED_ARRAY)
    return options


def _add(options: PeerOptions, words: list[str]) -> None:
    for key, values in flags(words):
        if len(values) < 2 or MARK in "".join(values):
            options.add(key, " ".join(values) if values else "true")
        else:
            options.unresolved.pop(key, None)
            options.values[key] = values
