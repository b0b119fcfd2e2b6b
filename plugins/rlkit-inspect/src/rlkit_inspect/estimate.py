"""Estimates of a run from the models' shapes: tokens, operations and time. No model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from rlkit.base.text import counted
from rlkit.interfaces.engine import Capability
from rlkit.interfaces.loss import Inputs
from rlkit.models.activations import frozen_bytes, precision_of
from rlkit.models.config import context_length, naming
from rlkit.models.size import Size, find_config, size_of
from rlkit.recipe import Critic, Recipe
from rlkit_inspect.gpus import H100, Gpu

if TYPE_CHECKING:
    from rlkit.api.prompts import AnswerSizes

UTILISATION = 0.3
"""The assumed utilisation in training."""

CPU_MODEL = 10_000_000
"""Parameters up to which a model trains on a CPU."""

BANDWIDTH_SHARE = 0.6
"""The share of a GPU's bandwidth at which a decode step reads weights."""

SERVER_OVERHEAD = 3e-3
"""Overhead of a decode step on a server with CUDA graphs, in seconds."""
LAYER_OVERHEAD = 0.6e-3
"""Overhead of a decode step for each layer that Python calls, in seconds."""
RECORDED_LAYER_OVERHEAD = 0.2e-3
"""The same where steps are recorded, recordings and sampling included: 5 ms for 24 layers and 256 rows on an H200."""


@dataclass(frozen=True)
class Setting:
    """The inputs of an estimate.

    Args:
        recipe: The run's recipe.
        policy: The policy's shape.
        critic: The critic's shape, if the recipe has a critic in the trainer's processes.
        prompt_tokens: Average tokens of a prompt.
        longest_prompt: Tokens of the longest prompt.
        ranks: Number of data-parallel ranks.
        shards: Number of ranks over which a model's weights are sharded.
        answers: Sizes of recorded answers, if they are known.
        gpu: The GPU to estimate for; None for this machine's device, timed as an H100 if it may be a GPU.
    """

    recipe: Recipe
    policy: Size
    critic: Size | None
    prompt_tokens: float
    longest_prompt: int
    ranks: int = 1
    shards: int = 1
    answers: AnswerSizes | None = None
    gpu: Gpu | None = None

    @property
    def is_sampled(self) -> bool:
        """Whether an engine samples the completions of steps."""
        return self.recipe.method.samples

    @property
    def reads_policy(self) -> bool:
        """Whether the engine samples from the trainer's weights."""
        return Capability.READS_POLICY in self.recipe.rollout.engine.capabilities

    @property
    def gpu_bytes(self) -> int | None:
        """Memory of the GPU to estimate for; None for this machine's device."""
        return None if self.gpu is None else self.gpu.memory

    @property
    def timed_gpu(self) -> Gpu | None:
        """The GPU whose speed is assumed; None on a CPU, for a model that needs no GPU, or if the speed is unknown."""
        if self.gpu is None:
            return None if self.recipe.fabric.accelerator == "cpu" or self.policy.base < CPU_MODEL else H100
        return self.gpu if self.gpu.half else None

    @property
    def context(self) -> int:
        return context_length(self.policy.config)

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
        """The trainer's precision: `mixed`, `float32`, or `half` for weights in bfloat16 without autocast."""
        return precision_of(self.recipe.model, self.recipe.fabric)

    @property
    def samples_from_copies(self) -> bool:
        """Whether the engine samples through copies of the weights in the data type of computations."""
        sampled = self.is_sampled or self.recipe.samples_validation
        return sampled and self.reads_policy and self.policy.config.model_type in {"llama", "mistral", "qwen2", "qwen3"}

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
    policy = size_of(find_config(model), model.lora, model.trust_remote_code, scores=model.scores, vision=model.vision)
    size = None if critic is None or "critic" in recipe.placed else critic_size(recipe, critic)
    return Setting(recipe, policy, size, prompt_tokens, longest_prompt, ranks, shards, answers)


def critic_size(recipe: Recipe, critic: Critic) -> Size:
    """Return the shape of the critic.

    Raises:
        RecipeError: Its configuration cannot be loaded.
    """
    with naming("critic.path" if critic.path else "model.path"):
        config = find_config(recipe.model.at(critic.path))
    return size_of(config, critic.lora, recipe.model.trust_remote_code, scores=True)


def work(setting: Setting) -> dict[str, float]:
    """Estimate a step of one rank: its `tokens`, the operations to `learn`, and the `decode steps` of its engine."""
    recipe = setting.recipe
    tokens = setting.rows * (setting.prompt_tokens + setting.completion_tokens)
    learned = tokens / recipe.fabric.sequence_parallel
    operations = setting.policy.base * _passes(setting, setting.policy.lora)
    measures_reference = recipe.needs_ref_logps and "reference" not in recipe.placed
    operations += 2 * setting.policy.base * (int(recipe.needs_old_logps) + int(measures_reference))
    if setting.critic is not None:
        operations += setting.critic.base * (2 + _passes(setting, setting.critic.lora))
    if not setting.is_sampled:
        return {"tokens": tokens, "learn": learned * operations, "decode steps": 0.0}
    batch_rows = min(setting.rows, getattr(recipe.rollout.engine, "max_rows", None) or setting.rows)
    steps = (
        setting.rows / batch_rows * setting.completion_tokens
        + recipe.rollout.sampling.max_tokens
        - setting.completion_tokens
    )
    return {"tokens": tokens, "learn": learned * operations, "decode steps": steps}


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
    gpu = setting.timed_gpu
    if gpu is None:
        return
    seconds = step_seconds(setting, gpu)
    step, steps = seconds.sampling + seconds.learning, recipe.train.steps
    total = "" if steps is None else f", {step * steps / 3600:.1f} h for {counted(steps, 'step')}"
    sampled = f"{seconds.sampling:.0f} s to sample + {seconds.learning:.0f} s to learn = " if setting.is_sampled else ""
    decodes = f" and makes a decode step in {seconds.decode_step * 1e3:.0f} ms" if setting.is_sampled else ""
    yield (
        f"time, estimated: {sampled}{step:.0f} s a step{total} "
        f"without validation; assumes an {gpu.name}{per_rank} that learns at "
        f"{_learning_speed(setting, gpu) / 1e12:.0f} TFLOP/s ({UTILISATION:.0%} of its peak){decodes}"
    )


class StepSeconds(NamedTuple):
    """Estimated seconds of a step on a rank: to sample, to learn, and of one decode step."""

    sampling: float
    learning: float
    decode_step: float


def step_seconds(setting: Setting, gpu: Gpu) -> StepSeconds:
    """Estimate the seconds of a step on a GPU whose speed is known."""
    step_work = work(setting)
    decode_step = _decode_seconds(setting, gpu.bandwidth * BANDWIDTH_SHARE)
    learning = step_work["learn"] / _learning_speed(setting, gpu)
    return StepSeconds(step_work["decode steps"] * decode_step, learning, decode_step)


def _learning_speed(setting: Setting, gpu: Gpu) -> float:
    """Return operations per second in training."""
    return (gpu.single if setting.precision == "float32" else gpu.half) * UTILISATION


def _decode_seconds(setting: Setting, bandwidth: float) -> float:
    """Return the seconds of a decode step of all rows, which reads `bandwidth` bytes of weights per second."""
    if not setting.reads_policy:
        return SERVER_OVERHEAD + setting.policy.base * 2 / bandwidth
    cast_per_step = setting.precision == "mixed" and not setting.half_base and not setting.samples_from_copies
    weight_bytes = 8 if cast_per_step else 2  # read in float32, written in bfloat16, read again
    merged = setting.samples_from_copies or not setting.policy.lora
    layers = setting.policy.config.num_hidden_layers * (1 if merged else 2)  # adapters double the calls
    overhead = RECORDED_LAYER_OVERHEAD if setting.samples_from_copies else LAYER_OVERHEAD
    return float(overhead * layers + setting.policy.base * weight_bytes / bandwidth)
