"""prime-rl's options (of `rl`), and the rule of each."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping

from rlkit.base.errors import RecipeError
from rlkit_convert.conversion import Conversion
from rlkit_convert.rules import ByHand, Equivalent, Rule, equivalents, read_together, without_equivalent
from rlkit_convert.shell import flags
from rlkit_convert.source import PeerOptions, leaves
from rlkit_convert.values import choice, integer, number, text

DEFAULTS: dict[str, object] = {
    "orchestrator.group_size": 1, "orchestrator.max_off_policy_steps": 8, "trainer.optim.lr": 1e-6,
    "trainer.optim.weight_decay": 0.01, "trainer.model.ac": True,
}  # fmt: skip
"""prime-rl's defaults that differ from rlkit's."""
OLDER_NAMES = {
    "orchestrator.rollouts_per_example": "orchestrator.group_size",
    "orchestrator.sampling.max_tokens": "orchestrator.train.sampling.max_completion_tokens",
    "orchestrator.sampling.temperature": "orchestrator.train.sampling.temperature",
    "orchestrator.env": "orchestrator.train.source", "max_async_level": "orchestrator.max_off_policy_steps",
    "orchestrator.max_async_level": "orchestrator.max_off_policy_steps", "trainer.max_steps": "max_steps",
    "wandb.project": "monitors.wandb.project", "wandb.name": "monitors.wandb.name",
    "trainer.model.name": "model.name", "orchestrator.seq_len": "seq_len", "orchestrator.max_steps": "max_steps",
    **{f"trainer.model.experimental.lora.{name}": f"trainer.model.lora.{name}"
       for name in ("rank", "alpha", "dropout", "target_modules", "modules_to_save")},
    "ckpt.keep": "ckpt.keep_last", "orchestrator.eval.rollouts_per_example": "orchestrator.eval.group_size",
    "orchestrator.eval.env": "orchestrator.eval.source",
}  # fmt: skip
"""Names of earlier versions, and those of later ones."""
SCHEDULES = {"constant": "Constant", "linear": "Linear", "cosine": "Cosine"}
ATTENTIONS = {name: name for name in ("auto", "sdpa", "flash_attention_2", "flash_attention_3")}
OPTIMIZERS = {"adamw": "AdamW", "muon": "Muon"}
ENVIRONMENT = "VerifiersTask of rlkit-env-verifiers has one environment; several are mixed by task Mix"

REMEDIES = {
    "log.* *.log.* slurm.* *.env_vars.* output_dir *.output_dir *.heartbeat.*": "nothing to do: a run has its own "
    "folder, log and metrics",
    "weight_broadcast.* *.weight_broadcast.* *.rollout_transport.* *.transport.* *.client.*": "nothing to do: rlkit "
    "sends weights and samples itself",
    "orchestrator.renderer.* *.concurrency.* *.num_train_workers *.tasks_per_minute *.env_server_*": "nothing to "
    "do: conversations are joined token by token; rollout.max_conversations bounds those at once",
    "deployment.*": "fabric.devices are the trainer's; rollout.engine.first_gpu and servers are the engines'",
    "inference.* inference": "an argument of the engine, in rollout.engine.launch.args",
    "orchestrator.train.filter_zero_advantages": "nothing to do: samples of advantage 0 have no gradient",
    "orchestrator.model.lora.* orchestrator.model.*": "nothing to do: engines have the trainer's model",
    "ckpt.* trainer.ckpt.* orchestrator.ckpt.* ckpt resume.*": "save.every; rlkit fit --resume RUN",
    "monitors.* *.monitors.*": "log.loggers: Wandb, TensorBoard, MLflow, Trackio, SwanLab or ClearML",
    "trainer.model.compile.* trainer.model.compile trainer.model.seq_len trainer.model.*offload*": "nothing to do: the "
    "gradient is the same without it",
    "trainer.model.* trainer.scheduler.decay_steps": "fabric.strategy: fsdp2 shards over all ranks; see also "
    "`model:` and train.schedule",
    "trainer trainer.data.* trainer.gc.* trainer.dist_timeout_seconds *.skip_first_step": "nothing to do",
}  # fmt: skip

RULES: dict[str, Rule] = {
    **read_together({
        "orchestrator.": "batch_size train.source algo.* eval.num_examples",
        "trainer.": "optim.type scheduler.type model.lora model.lora.rank model.lora.alpha model.lora.target_modules "
        "loss.type loss.dppo_mask_low loss.dppo_mask_high",
        "monitors.": "wandb.project wandb.name",
        "inference.": "vllm.tensor_parallel_size parallel.tp",
    }),
    **equivalents(text, {
        "model.name": "model.path", "orchestrator.tokenizer.chat_template": "model.chat_template",
        "trainer.tokenizer.chat_template": "model.chat_template",
    }),
    **equivalents(integer, {
        "max_steps": "train.steps", "seq_len": "conversation.tokens", "orchestrator.group_size": "rollout.group_size",
        "orchestrator.max_off_policy_steps": "rollout.max_staleness",
        "orchestrator.train.sampling.max_completion_tokens": "rollout.sampling.max_tokens",
        "orchestrator.eval.sampling.max_tokens": "validation.sampling.max_tokens",
        "orchestrator.eval.sampling.max_completion_tokens": "validation.sampling.max_tokens",
        "orchestrator.eval.interval": "validation.every", "orchestrator.eval.group_size": "validation.samples",
        "trainer.scheduler.warmup_steps": "train.warmup_steps", "ckpt.interval": "save.every",
        "ckpt.keep_last": "save.keep_last", "deployment.num_train_gpus": "fabric.devices",
    }),
    **equivalents(number, {
        "orchestrator.train.sampling.temperature": "rollout.sampling.temperature",
        "orchestrator.eval.sampling.temperature": "validation.sampling.temperature", "trainer.optim.lr": "train.lr",
        "trainer.optim.weight_decay": "train.weight_decay", "trainer.optim.max_norm": "train.max_grad_norm",
    }),
    "orchestrator.token_batch_size": ByHand("train.prompts_per_step counts prompts"),
    "orchestrator.*sampling.repetition_penalty": ByHand("rlkit has none: log-probs would differ from the trainer's"),
    **dict.fromkeys(("orchestrator.train.sampling.*", "orchestrator.sampling.*"), ByHand("see rollout.sampling")),
    "orchestrator.eval.sampling.*": ByHand("see validation.sampling"),
    "orchestrator.mask_truncated_completions": Equivalent("train.mask_truncated", bool),
    "orchestrator.oversampling_factor": ByHand("steps with rollout.max_staleness wait for no group", (1.0,)),
    "orchestrator.train.curriculum*": ByHand("curriculum: Difficulty or SuccessRate"),
    "orchestrator.buffer.*": ByHand("curriculum: Difficulty or SuccessRate; rollout.filter"),
    "orchestrator.advantage.*": ByHand("see the part `advantage:`"),
    "orchestrator.eval.source": ByHand("validation.tasks: a VerifiersTask for each, by name"),
    "*tokenizer.*": ByHand("the model's own tokenizer is used; put yours in the model's folder"),
    "trainer.optim.*": ByHand("an option of train.optimizer"),
    "trainer.scheduler.min_lr": ByHand("train.schedule.min_lr_ratio, a share of train.lr"),
    "trainer.model.lora.*": ByHand("rlkit's adapters have no dropout and no such targets"),
    **dict.fromkeys(("trainer.model.ac", "trainer.model.ac.*"), Equivalent("train.checkpoint_activations", bool)),
    "trainer.model.attn": Equivalent("model.attention", choice(ATTENTIONS)),
    "trainer.model.quantization.*": ByHand("rlkit trains in fabric.precision: bf16-mixed"),
    "trainer.model.optimization_dtype": ByHand("trained weights are float32", ("float32",)),
    "trainer.model.freeze_moe_router": ByHand("rlkit trains the router too"),
    "trainer.loss.*": ByHand("see the part `loss:`; kl_tau and adv_tau have no equivalent"),
    **without_equivalent(REMEDIES),
}  # fmt: skip


def read(content: str, name: str, overrides: list[str]) -> PeerOptions:
    """Return the options of a TOML file; an empty table is an option that is on. Then the overrides.

    Raises:
        RecipeError: It is no TOML.
    """
    try:
        tables = tomllib.loads(content)
    except (ValueError, RecursionError) as error:
        raise RecipeError(f"{name} is no TOML: {' '.join(str(error).split())}") from error
    options = PeerOptions()
    for key, value in leaves(tables):
        options.values[options.rename(key, OLDER_NAMES)] = True if value == {} else value
    for key, values in flags(overrides):
        options.add(options.rename(key, OLDER_NAMES), values[0] if values else "true")
    return options


def environments(conversion: Conversion) -> None:
    """Set the environment of verifiers, with its task, its agent and its reward."""
    key = "orchestrator.train.source"
    sources = conversion.raw(key, [])
    tables = [source for source in sources if isinstance(source, Mapping)] if isinstance(sources, list) else []
    if not tables:
        conversion.ask("model.name", "there is no environment in this file; set `task:` and `reward:`")
        return
    environment = tables[0].get("env")
    if not isinstance(environment, Mapping):  # the form of earlier versions
        options = tables[0].get("args")
        environment = {"taskset": {"id": tables[0].get("id"), **(options if isinstance(options, Mapping) else {})}}
    conversion.set("task", "VerifiersTask", key)
    conversion.set("task.environment", dict(environment), key)
    conversion.set("agent", "VerifiersAgent", key)
    conversion.set("reward", "VerifiersReward", key)
    conversion.ask(key, "the environment's code runs: read it, then set task.allow_code: true")
    extra = sorted({name for table in tables for name in table} - {"env", "id", "args", "name"})
    if len(tables) > 1 or extra:
        conversion.notes[key] += "; " + "; ".join(filter(None, (ENVIRONMENT, ", ".join(extra))))


def training(conversion: Conversion) -> None:
    """Set prompts of a step, the optimizer, the schedule and adapters."""
    group = max(conversion.get("orchestrator.group_size", integer, 1), 1)
    if conversion.has("orchestrator.batch_size"):
        samples = conversion.get("orchestrator.batch_size", integer, 1)
        conversion.set("train.prompts_per_step", max(samples // group, 1), "orchestrator.batch_size")
    key = "trainer.optim.type"
    conversion.carry_given("train.optimizer", key, choice(OPTIMIZERS), "AdamW")
    conversion.carry_given("train.schedule", "trainer.scheduler.type", choice(SCHEDULES), "Constant")
    names = [key for key in conversion.options.values if key.startswith("trainer.model.lora")]
    if names:
        conversion.carry("model.lora.rank", "trainer.model.lora.rank", integer, 16, *names)
        conversion.carry("model.lora.alpha", "trainer.model.lora.alpha", number, 32.0)
        targets = "trainer.model.lora.target_modules"
        if conversion.has(targets):
            conversion.set("model.lora.targets", conversion.raw(targets), targets)
    conversion.set("fabric.precision", "bf16-mixed")


def algorithm(conversion: Conversion) -> None:
    """Set the estimator and the loss."""
    key = "orchestrator.algo.type"
    name = conversion.get(key, text, "grpo")
    if name == "grpo":
        conversion.set("advantage", "GRPO", key)
        conversion.set("advantage.scale_by_std", False, key)
    elif name == "rae":
        conversion.set("advantage", "RAE", key)
        conversion.carry_given("advantage.decay", "orchestrator.algo.decay", number, 0.95)
    else:
        why = "the section `teacher:`, rlkit docs distillation" if name in ("opd", "opsd", "sft") else "no equivalent"
        conversion.ask(key, f"{why}; set `advantage:`")
    for option in conversion.options.values:
        if option.startswith("orchestrator.algo.") and not conversion.carries(option) and option != key:
            conversion.ask(option, "an option of the algorithm: see the parts `advantage:`, `loss:` and `teacher:`")
    loss = conversion.get("trainer.loss.type", text, "default")
    if loss == "default":
        conversion.set("loss", "DPPO", "trainer.loss.type")
        conversion.set("train.old_logps", "rollout", "trainer.loss.type")  # ratios to the engine's log-probs
        for side in ("low", "high"):
            conversion.carry(f"loss.clip_{side}", f"trainer.loss.dppo_mask_{side}", number, 0.2)
    else:
        conversion.ask("trainer.loss.type", "see the part `loss:`, or write one as a plugin")


def running(conversion: Conversion) -> None:
    """Set the engine, validation and the logger."""
    conversion.set("rollout.engine", "VllmServer")
    for key in filter(conversion.has, ("inference.vllm.tensor_parallel_size", "inference.parallel.tp")):
        conversion.carry("rollout.engine.launch.tensor_parallel", key, integer, 1)
    limit = conversion.get("orchestrator.eval.num_examples", integer, -1)
    if limit > 0:
        conversion.set("validation.limit", limit, "orchestrator.eval.num_examples")
    names = ("monitors.wandb.project", "monitors.wandb.name")
    if any(map(conversion.has, names)):
        project, name = (conversion.get(key, text, "") or None for key in names)
        options = {"project": project or "prime-rl", "name": name}
        conversion.set("log.loggers", [{"class_path": "Wandb", "init_args": options}], *filter(conversion.has, names))


FUNCTIONS = (environments, training, algorithm, running)
