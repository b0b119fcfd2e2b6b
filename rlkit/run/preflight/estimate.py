"""Estimates of a run from the models' shapes: tokens, operations, time and memory. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.optimizer import Optimizer
from rlkit.models.activations import activation_bytes, frozen_bytes, precision_of, token_limit
from rlkit.models.load import naming
from rlkit.models.optimizer_state import state_size
from rlkit.models.size import Size, find_config, kv_bytes, size_of
from rlkit.ops.logps import CHUNK_BYTES
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.lengths import AnswerSizes

FLOPS = {"float32": 67e12, "half": 989e12, "mixed": 989e12}
"""Operations per second of an H100, by the trainer's precision."""

UTILISATION = 0.3
"""The assumed utilisation in training."""

BANDWIDTH = 2e12
"""Bytes of weights per second read by a decode step: about 60% of an H100's bandwidth."""

SERVER_OVERHEAD = 3e-3
"""Overhead of a decode step on a server with CUDA graphs, in seconds."""
LAYER_OVERHEAD = 0.6e-3
"""Overhead of a decode step for each layer that Python calls, in seconds."""


@dataclass(frozen=True)
class Setting:
    """The inputs of an estimate.

    Args:
        recipe: The run's recipe.
        policy: The policy's shape.
        critic: The critic's shape, if the recipe has a critic.
        prompt_tokens: Average tokens of a prompt.
        longest_prompt: Tokens of the longest prompt.
        ranks: Number of data-parallel ranks.
        shards: Number of ranks over which a model's weights are sharded.
        answers: Sizes of recorded answers, if they are known.
    """

    recipe: Recipe
    policy: Size
    critic: Size | None
    prompt_tokens: float
    longest_prompt: int
    ranks: int = 1
    shards: int = 1
    answers: AnswerSizes | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether an engine samples the completions of steps."""
        return not self.recipe.rollout.engine.recorded

    @property
    def context(self) -> int:
        return int(getattr(self.policy.config, "max_position_embeddings", None) or 1 << 20)

    @property
    def completion_tokens(self) -> float:
        """Average tokens of a completion: as recorded, or half the limit, as assumed."""
        if self.answers is not None:
            return self.answers.tokens
        return min(self.recipe.rollout.sampling.max_tokens / 2, self.context - self.prompt_tokens)

    @property
    def rows(self) -> int:
        """Trajectories of a step on a rank; an average if answers are recorded."""
        prompts = -(-self.recipe.train.prompts_per_step // self.ranks)
        return round(prompts * (self.group_size if self.answers is None else self.answers.count))

    @property
    def group_size(self) -> int:
        """Trajectories of the largest group; the smallest that the loss reads if recorded answers are unread."""
        recipe = self.recipe
        if self.is_sampled:
            return recipe.rollout.group_size
        return 1 + (Inputs.GROUPS in recipe.loss.inputs) if self.answers is None else self.answers.most

    @property
    def longest_row(self) -> int:
        """Tokens of the longest trajectory."""
        tokens = self.longest_prompt + self.recipe.rollout.sampling.max_tokens
        return int(min(tokens if self.answers is None else self.answers.longest, self.context))

    @property
    def precision(self) -> str:
        """The trainer's precision: `mixed`, `float32`, or `half` for adapters on such a base without autocast."""
        return precision_of(self.recipe.model, self.recipe.fabric)

    @property
    def samples_from_copies(self) -> bool:
        """Whether the engine samples through copies of the weights in the data type of computations."""
        sampled = self.is_sampled or (self.recipe.validation is not None and self.recipe.generates)
        reads = sampled and getattr(self.recipe.rollout.engine, "reads_policy", False)
        return reads and self.policy.config.model_type in {"llama", "mistral", "qwen2", "qwen3"}

    @property
    def half_base(self) -> bool:
        """Whether the policy's weights are frozen, in bfloat16."""
        return self.recipe.model.lora is not None and self.frozen_weight_bytes == 2

    @property
    def frozen_weight_bytes(self) -> int:
        """Bytes of a frozen weight."""
        return frozen_bytes(self.recipe.model, self.recipe.fabric)


def setting(
    recipe: Recipe,
    prompt_tokens: float,
    longest_prompt: int,
    ranks: int = 1,
    shards: int = 1,
    *,
    answers: AnswerSizes | None = None,
) -> Setting:
    """Return the setting of a recipe, with its models' shapes; for the arguments see `Setting`.

    Raises:
        RecipeError: A model's configuration cannot be loaded, so its shape is unknown.
    """
    model, critic = recipe.model, recipe.critic
    policy = size_of(find_config(model), model.lora, model.trust_remote_code, scores=not recipe.generates)
    critic_size = None
    if critic is not None:
        critic_model = replace(model, path=critic.path or model.path, lora=None)
        with naming("critic.path" if critic.path else "model.path"):
            critic_size = size_of(find_config(critic_model), critic.lora, model.trust_remote_code, scores=True)
    return Setting(recipe, policy, critic_size, prompt_tokens, longest_prompt, ranks, shards, answers)


def work(setting: Setting) -> dict[str, float]:
    """Estimate a step of one rank: its `tokens`, the operations to `learn`, and the `decode steps` of its engine."""
    recipe = setting.recipe
    tokens = setting.rows * (setting.prompt_tokens + setting.completion_tokens)
    operations = setting.policy.base * _passes(setting, setting.policy.lora)
    operations += 2 * setting.policy.base * (int(recipe.needs_old_logps) + int(recipe.needs_ref_logps))
    if setting.critic is not None:
        operations += setting.critic.base * (2 + _passes(setting, setting.critic.lora))
    if not setting.is_sampled:
        return {"tokens": tokens, "learn": tokens * operations, "decode steps": 0.0}
    batch_rows = min(setting.rows, getattr(recipe.rollout.engine, "max_rows", setting.rows))
    steps = (
        setting.rows / batch_rows * setting.completion_tokens
        + recipe.rollout.sampling.max_tokens
        - setting.completion_tokens
    )
    return {"tokens": tokens, "learn": tokens * operations, "decode steps": steps}


def _passes(setting: Setting, lora: int) -> int:
    """Return the training operations per token and weight: 2 forward, 2 for activations, 2 for weight gradients."""
    per_epoch = 6 - 2 * (lora > 0) + 2 * setting.recipe.train.checkpoint_activations
    return per_epoch * setting.recipe.train.epochs


def lines(setting: Setting) -> Iterator[str]:
    """Yield the estimated cost of a step, with its assumptions."""
    recipe, step_work = setting.recipe, work(setting)
    per_rank = "" if setting.ranks == 1 else " on each rank"
    source = "half the limit" if setting.answers is None else "on average"
    yield (
        f"a step, estimated: {setting.rows} rows of a prompt of {setting.prompt_tokens:.0f} and an answer of "
        f"{setting.completion_tokens:.0f} tokens ({source}) = {step_work['tokens']:,.0f} tokens{per_rank}; "
        f"{step_work['learn']:.2g} operations to learn"
    )
    if recipe.mix:
        yield f"not included: the rows of {', '.join(f'mix.{name}' for name in recipe.mix)}"
    if recipe.fabric.accelerator == "cpu":
        return
    decode_seconds = _decode_seconds(setting)
    speed = FLOPS[setting.precision] * UTILISATION
    sampling = step_work["decode steps"] * decode_seconds
    learning = step_work["learn"] / speed
    step, steps = sampling + learning, recipe.train.steps
    sampled = f"{sampling:.0f} s to sample + {learning:.0f} s to learn = " if setting.is_sampled else ""
    decodes = f" and makes a decode step in {decode_seconds * 1e3:.0f} ms" if setting.is_sampled else ""
    yield (
        f"time, estimated: {sampled}{step:.0f} s a step, {step * steps / 3600:.1f} h for {steps} steps without "
        f"validation; assumes an H100{per_rank} that learns at {speed / 1e12:.0f} TFLOP/s "
        f"({UTILISATION:.0%} of its peak){decodes}"
    )


def _decode_seconds(setting: Setting) -> float:
    """Return the seconds of a decode step of all rows."""
    if not getattr(setting.recipe.rollout.engine, "reads_policy", False):
        return SERVER_OVERHEAD + setting.policy.base * 2 / BANDWIDTH
    cast_per_step = setting.precision == "mixed" and not setting.half_base and not setting.samples_from_copies
    weight_bytes = 8 if cast_per_step else 2  # read in float32, written in bfloat16, read again
    merged = setting.samples_from_copies or not setting.policy.lora
    layers = setting.policy.config.num_hidden_layers * (1 if merged else 2)  # adapters double the calls
    return float(LAYER_OVERHEAD * layers + setting.policy.base * weight_bytes / BANDWIDTH)


def memory(setting: Setting) -> dict[str, float]:
    """Estimate a rank's memory in MiB by phase, without that of an engine's own server."""
    recipe, train = setting.recipe, setting.recipe.train
    models = [setting.policy] + ([] if setting.critic is None else [setting.critic])
    states = gradients = casts = 0.0
    for model, section in zip(models, (train, recipe.critic), strict=False):
        states += model.base * (setting.frozen_weight_bytes if model.lora else 4) + model.lora * 4
        states += 0 if section is None else optimizer_bytes(section.optimizer, model)
        gradients += 4 * model.trained
        if setting.precision == "mixed":  # autocast keeps cast copies of weights that are not in bfloat16
            casts = max(casts, 2 * model.base * (model.lora == 0 or setting.frozen_weight_bytes == 4))
    states += 4 * setting.policy.trained * (train.ema is not None)
    if recipe.needs_reference and not setting.policy.lora:
        states += setting.policy.base * setting.frozen_weight_bytes
    row = setting.longest_row
    step_tokens = setting.rows * row
    cached = min(getattr(recipe.rollout.engine, "max_kv_tokens", 0), step_tokens)
    width = 2 if setting.half_base or setting.precision == "mixed" else 4
    indivisible = row * (setting.group_size if Inputs.GROUPS in recipe.loss.inputs else 1)
    tokens = min(max(token_limit(train, recipe.model, recipe.fabric), indivisible), step_tokens)
    activations = max(_activations(setting, model, tokens) for model in models)
    teacher = (
        step_tokens * 12.0 * recipe.loss.forward.teacher_top
    )  # ids and log-probs of a teacher's most likely tokens
    gathered = setting.policy.base * (2 if setting.precision == "mixed" else 4) if setting.shards > 1 else 0
    phases = {
        "weights and optimizer": states / setting.shards,
        "sampling, besides": kv_bytes(setting.policy.config, cached, width) + gathered,
        "learning, besides": activations + gradients / setting.shards + casts / setting.shards + teacher,
    }
    if setting.samples_from_copies:
        phases["copies to sample through, on a GPU if they fit a quarter of it"] = float(setting.policy.base * width)
    return {phase: size / 2**20 for phase, size in phases.items()}


def optimizer_bytes(part: Optimizer, model: Size) -> float:
    """Return the bytes of an optimizer's state of a model.

    Raises:
        PartError: The part raised.
    """
    with calling(part, "make"):
        bytes_of = state_size(part)
    return sum(count * bytes_of(kind, shape) for (kind, shape), count in model.shapes.items())


def _activations(setting: Setting, model: Size, tokens: int) -> float:
    """Return the bytes that a micro-batch keeps for the backward pass, with the largest chunk of its logits."""
    hidden = model.config.hidden_size
    layer, layers = activation_bytes(model.config, setting.precision, model.lora > 0)
    if setting.recipe.train.checkpoint_activations:  # each layer's input, and one layer computed again
        layer += layers * hidden * setting.frozen_weight_bytes if model.lora else layers * hidden * 4
        layers = 1
    logits = min(4 * tokens * model.outputs, CHUNK_BYTES)
    return float(tokens * layer * layers + 2 * logits)  # their gradient too
