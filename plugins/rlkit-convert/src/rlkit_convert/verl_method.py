"""verl's options of the method, the data, the tools and the model that have no equivalent: to be set by hand."""

from __future__ import annotations

from rlkit_convert.rules import ByHand, Rule
from rlkit_convert.verl_runtime import ACTOR, MODEL, REF, ROLLOUT

AGENT = "an environment, an interaction or tools of your own: rlkit docs tools-and-environments"
COLUMN = "the task Verl reads the column {!r}; rename yours"
WRITE_TOOL = "rlkit plugins new NAME --kind tool"
TASK = "write a task as a plugin: rlkit plugins new NAME --kind task"
OTHER_NAME = "another version's name of {}; set those instead"
OPTIMIZER = "train.optimizer: AdamW, AdamW8bit, Muon or TorchOptimizer, with its options"
QUANTIZATION = "rlkit has no quantization-aware training: weights are trained as they are"
ROUTING = "train.router_replay: rlkit replays the experts that another engine selected, where it returns them"
CORRECTION = "see the sections `correction:` and `rejection:`"
DISTILLATION = "the section `teacher:`; rlkit docs distillation"

RULES: dict[str, Rule] = {
    "*.qat": ByHand(QUANTIZATION),
    "*.qat.*": ByHand(QUANTIZATION),
    "*.mtp.*": ByHand("rlkit does not train or use heads that predict several tokens"),
    "*.router_replay.*": ByHand(ROUTING, ("disabled",)),
    f"{ROLLOUT}.enable_rollout_routing_replay": ByHand(ROUTING),
    "data.custom_cls.*": ByHand(
        "task: {class_path: PythonTask, init_args: {function: FILE.py:CLASS, allow_code: true}}; CLASS has `rows` and "
        "`prompt` in place of verl's __getitem__: rlkit docs plugins/task"
    ),
    "data.datagen.*": ByHand(TASK),
    "data.sampler.*": ByHand("curriculum: Difficulty, SuccessRate, or one from a plugin"),
    "data.shuffle": ByHand("curriculum Difficulty orders rows by a column; rlkit shuffles otherwise", (True,)),
    "data.prompt_key": ByHand(COLUMN.format("prompt") + ", or take HFDataset with prompt_field", ("prompt",)),
    "data.reward_fn_key": ByHand(COLUMN.format("data_source"), ("data_source",)),
    "data.image_key": ByHand(COLUMN.format("images"), ("images",)),
    "data.video_key": ByHand(COLUMN.format("videos") + " to it: its values are frames", ("videos",)),
    "data.audio_key": ByHand("rlkit reads no audio", ("audios",)),
    "data.tokenizer": ByHand("the model's own tokenizer is used; put yours in the model's folder"),
    f"{MODEL}.external_lib": ByHand("make your code a plugin: rlkit plugins new NAME"),
    f"{MODEL}.tokenizer_path": ByHand("the model's own tokenizer is used; put yours in the model's folder"),
    "*.exclude_modules": ByHand("lora.targets names the modules with adapters"),
    "*.lora.dropout": ByHand("rlkit's adapters have no dropout"),
    "*.lora.dropout_position": ByHand("rlkit's adapters have no dropout", ("pre",)),
    "*.lora.lora_A_init_method": ByHand("rlkit's adapters start as peft's do", ("xavier",)),
    "*.lora.lora_B_init_method": ByHand("rlkit's adapters start as peft's do", ("zero",)),
    "*.lora_adapter_path": ByHand("model.path may be the folder of the adapter, which is trained further"),
    f"{ACTOR}.kl_loss.*": ByHand(OTHER_NAME.format("use_kl_loss, kl_loss_coef and kl_loss_type")),
    "algorithm.in_reward_kl.*": ByHand(OTHER_NAME.format("use_kl_in_reward and kl_ctrl")),
    f"{ACTOR}.loss_scale_factor": ByHand("seq_mean_token_sum_norm divides by rollout.sampling.max_tokens"),
    "*.optim.optimizer": ByHand(OPTIMIZER, ("AdamW", "adam", "adamw")),
    "*.optim.optimizer_impl": ByHand(OPTIMIZER, ("torch.optim",)),
    "*.optim.lr_warmup_init": ByHand("a warm-up starts at 0"),
    "*.optim.min_lr": ByHand("schedule: Cosine, with min_lr_ratio"),
    "*.optim.lr_decay_steps": ByHand("a schedule ends with train.steps"),
    "*.optim.override_optimizer_config.*": ByHand(OPTIMIZER),
    f"{REF}.model*": ByHand("the reference is the initial policy, which the section `reference:` lets follow"),
    f"{ROLLOUT}.repetition_penalty": ByHand("rlkit has none: log-probs would differ from the trainer's", (1.0,)),
    f"{ROLLOUT}.do_sample": ByHand("training always samples", (True,)),
    f"{ROLLOUT}.ignore_eos": ByHand("completions always end at the end token"),
    f"{ROLLOUT}.quantization*": ByHand("rollout.engine.launch.dtype; log-probs would differ from the trainer's"),
    f"{ROLLOUT}.agent.default_agent_loop": ByHand(AGENT, ("single_turn_agent", "tool_agent")),
    f"{ROLLOUT}.agent.*": ByHand(AGENT),
    f"{ROLLOUT}.custom.*": ByHand(AGENT),
    f"{ROLLOUT}.multi_turn.function_tool_path": ByHand(f"tools of your own: {WRITE_TOOL}"),
    f"{ROLLOUT}.multi_turn.max_parallel_calls": ByHand("conversation.tool_calls counts all calls", (1,)),
    f"{ROLLOUT}.multi_turn.max_tool_response_length": ByHand("conversation.max_reply_tokens counts tokens", (256,)),
    f"{ROLLOUT}.multi_turn.tool_response_truncate_side": ByHand("rlkit leaves out the middle", ("middle",)),
    f"{ROLLOUT}.multi_turn.*": ByHand("see the section `conversation:`"),
    "critic.loss_agg_mode": ByHand("the critic's loss is the mean over all tokens", ("token-mean",)),
    "algorithm.use_pf_ppo": ByHand("rlkit has no preference-feedback PPO"),
    "algorithm.rollout_correction.loss_type": ByHand(CORRECTION, ("ppo_clip",)),
    "algorithm.rollout_correction.rollout_is*": ByHand(CORRECTION),
    "algorithm.rollout_*": ByHand(CORRECTION),
    "distillation.n*": ByHand(f"{DISTILLATION}; `placement:` gives the teacher GPUs of its own"),
    "distillation.*": ByHand(DISTILLATION),
    "async_training.*": ByHand("rollout.max_staleness lets rollouts run ahead: rlkit docs asynchronous"),
    "rollout.*": ByHand("engines on GPUs of their own: VllmServer, SGLangServer, with first_gpu"),
    "trainer.val_only": ByHand("rlkit validate"),
    "trainer.v1.trainer_mode": ByHand("rollout.max_staleness lets rollouts run ahead", ("sync",)),
    "reward_manager.module.path": ByHand("reward BatchReward, or one from a plugin"),
    "reward.reward_manager.module.path": ByHand("reward BatchReward, or one from a plugin"),
    "defaults": ByHand("verl's own defaults are assumed; also convert the file that this one builds on"),
    "--config-name": ByHand("its file sets more options; convert that file, with these options after it"),
    "--config-path": ByHand("its file sets more options; convert that file, with these options after it"),
}
