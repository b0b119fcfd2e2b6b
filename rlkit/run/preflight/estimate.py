"""Estimates of a run from the models' shapes: tokens, operations, time and memory; nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.optimizer import Optimizer
from rlkit.models.activations import activation_bytes, frozen_bytes, precision_of, token_limit
from rlkit.models.load import naming
from rlkit.models.size import Size, find_config, kv_bytes, size_of
from rlkit.ops.logps import CHUNK_BYTES
from rlkit.optimizers.trial import state_size
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.lengths import AnswerSizes

FLOPS = {"float32": 67e12, "half": 989e12, "mixed": 989e12}
"""Operations per second of an H100, by the trainer's precision."""

USED = 0.3
"""The assumed utilisation in training."""

BANDWIDTH = 2e12
"""Bytes of weights per second read by a decode step: about 60% of an H100's bandwidth."""

STEP_SERVER, STEP_LAYER = 3e-3, 0.6e-3
"""Seconds of a decode step besides: of a server with CUDA graphs in all, and of a layer called from Python."""


@dataclass(frozen=True)
class Setting:
    """The inputs of an estimate.

    Args:
        recipe: The run's.
        policy: The policy's shape.
        critic: The critic's shape, if there is one.
        prompt: Tokens of a prompt, on average.
        longest: Tokens of the longest prompt.
        ranks: Data-parallel ranks.
        shards: Ranks that a model's weights are divided among.
        answers: Sizes of recorded answers, where they are known.
    """

    recipe: Recipe
    policy: Size
    critic: Size | None
    prompt: float
    longest: int
    ranks: int = 1
    shards: int = 1
    answers: AnswerSizes | None = None

    @property
    def samples(self) -> bool:
        """Whether an engine samples the answers of steps."""
        return not self.recipe.rollout.engine.recorded

    @property
    def context(self) -> int:
        return int(getattr(self.policy.config, "max_position_embeddings", None) or 1 << 20)

    @property
    def answer(self) -> float:
        """Tokens of an answer, on average: as recorded, or half the limit, as assumed."""
        if self.answers is not None:
            return self.answers.tokens
        return min(self.recipe.rollout.sampling.max_tokens / 2, self.context - self.prompt)

    @property
    def rows(self) -> int:
        """Trajectories of a step on a rank; of recorded answers about so many."""
        prompts = -(-self.recipe.train.prompts_per_step // self.ranks)
        return round(prompts * (self.group if self.answers is None else self.answers.count))

    @property
    def group(self) -> int:
        """Trajectories of the largest group; of recorded answers that nobody has read, as few as the loss reads."""
        recipe = self.recipe
        if self.samples:
            return recipe.rollout.group_size
        return 1 + (Inputs.GROUPS in recipe.loss.inputs) if self.answers is None else self.answers.most

    @property
    def longest_row(self) -> int:
        """Tokens of the longest trajectory."""
        longest = self.longest + self.recipe.rollout.sampling.max_tokens
        return int(min(longest if self.answers is None else self.answers.longest, self.context))

    @property
    def computes(self) -> str:
        """How the trainer computes: `mixed`, in float32, or adapters on a base in `half` without autocast."""
        return precision_of(self.recipe.model, self.recipe.fabric)

    @property
    def fuses(self) -> bool:
        """Whether the engine samples through copies of the weights in the type of computations."""
        sampled = self.samples or (self.recipe.validation is not None and self.recipe.generates)
        reads = sampled and getattr(self.recipe.rollout.engine, "reads_policy", False)
        return reads and self.policy.config.model_type in {"llama", "mistral", "qwen2", "qwen3"}

    @property
    def half_base(self) -> bool:
        """Whether the policy's weights are frozen, in bfloat16."""
        return self.recipe.model.lora is not None and self.frozen == 2

    @property
    def frozen(self) -> int:
        """Bytes of a frozen weight."""
        return frozen_bytes(self.recipe.model, self.recipe.fabric)


def setting(
    recipe: Recipe,
    prompt: float,
    longest: int,
    ranks: int = 1,
    shards: int = 1,
    *,
    answers: AnswerSizes | None = None,
) -> Setting:
    """Find the shapes of a recipe's models; see `Setting`.

    Raises:
        RecipeError: A model's configuration cannot be had, and its shape is not known.
    """
    model, critic = recipe.model, recipe.critic
    policy = size_of(find_config(model), model.lora, model.trust_remote_code, scores=not recipe.generates)
    values = None
    if critic is not None:
        other = replace(model, path=critic.path or model.path, lora=None)
        with naming("critic.path" if critic.path else "model.path"):
            values = size_of(find_config(other), critic.lora, model.trust_remote_code, scores=True)
    return Setting(recipe, policy, values, prompt, longest, ranks, shards, answers)


def work(known: Setting) -> dict[str, float]:
    """Estimate a step of one rank: its `tokens`, the operations to `learn`, and the `decode steps` of its engine."""
    recipe, tokens = known.recipe, known.rows * (known.prompt + known.answer)
    learn = known.policy.base * _passes(known, known.policy.lora)
    learn += 2 * known.policy.base * (int(recipe.needs_old_logps) + int(recipe.needs_ref_logps))
    if known.critic is not None:
        learn += known.critic.base * (2 + _passes(known, known.critic.lora))
    if not known.samples:
        return {"tokens": tokens, "learn": tokens * learn, "decode steps": 0.0}
    at_once = min(known.rows, getattr(recipe.rollout.engine, "max_rows", known.rows))
    steps = known.rows / at_once * known.answer + recipe.rollout.sampling.max_tokens - known.answer
    return {"tokens": tokens, "learn": tokens * learn, "decode steps": steps}


def _passes(known: Setting, lora: int) -> int:
    """Return the operations per token and weight of learning: 2 forward, 2 to the layer before, 2 to the weights."""
    once = 6 - 2 * (lora > 0) + 2 * known.recipe.train.checkpoint_activations
    return once * known.recipe.train.epochs


def lines(known: Setting) -> Iterator[str]:
    """Yield the estimated cost of a step, with its assumptions."""
    recipe, found = known.recipe, work(known)
    each = "" if known.ranks == 1 else " on each rank"
    source = "half the limit" if known.answers is None else "on average"
    yield (
        f"a step, estimated: {known.rows} rows of a prompt of {known.prompt:.0f} and an answer of {known.answer:.0f} "
        f"tokens ({source}) = {found['tokens']:,.0f} tokens{each}; {found['learn']:.2g} operations to learn"
    )
    if recipe.mix:
        yield f"not in it: the rows of {', '.join(f'mix.{name}' for name in recipe.mix)}"
    if recipe.fabric.accelerator == "cpu":
        return
    second, speed = _decode_step(known), FLOPS[known.computes] * USED
    sampling, learning = found["decode steps"] * second, found["learn"] / speed
    step, steps = sampling + learning, recipe.train.steps
    sampled = f"{sampling:.0f} s to sample + {learning:.0f} s to learn = " if known.samples else ""
    decodes = f" and makes a decode step in {second * 1e3:.0f} ms" if known.samples else ""
    yield (
        f"time, estimated: {sampled}{step:.0f} s a step, {step * steps / 3600:.1f} h for {steps} steps without "
        f"validation; assumes an H100{each} that learns at {speed / 1e12:.0f} TFLOP/s ({USED:.0%} of its own){decodes}"
    )


def _decode_step(known: Setting) -> float:
    """Return the seconds of a decode step of all rows."""
    if not getattr(known.recipe.rollout.engine, "reads_policy", False):
        return STEP_SERVER + known.policy.base * 2 / BANDWIDTH
    whole = known.computes == "mixed" and not known.half_base
    casts = 8 if whole and not known.fuses else 2  # read, write, read again
    merged = known.fuses or not known.policy.lora
    layers = known.policy.config.num_hidden_layers * (1 if merged else 2)  # adapters double the calls
    return float(STEP_LAYER * layers + known.policy.base * casts / BANDWIDTH)


def memory(known: Setting) -> dict[str, float]:
    """Estimate a rank's memory in MiB by phase; what an engine's own server takes is not in it.

    Args:
        known: The models and the rows.
    """
    recipe, train = known.recipe, known.recipe.train
    models = [known.policy] + ([] if known.critic is None else [known.critic])
    states = gradients = casts = 0.0
    for model, section in zip(models, (train, recipe.critic), strict=False):
        states += model.base * (known.frozen if model.lora else 4) + model.lora * 4
        states += 0 if section is None else optimizer_bytes(section.optimizer, model)
        gradients += 4 * model.trained
        if known.computes == "mixed":  # autocast keeps the weights that it has cast, unless they are bfloat16 already
            casts = max(casts, 2 * model.base * (model.lora == 0 or known.frozen == 4))
    states += 4 * known.policy.trained * (train.ema is not None)
    if recipe.needs_reference and not known.policy.lora:
        states += known.policy.base * known.frozen
    row = known.longest_row
    everything = known.rows * row
    cached = min(getattr(recipe.rollout.engine, "max_kv_tokens", 0), everything)
    width = 2 if known.half_base or known.computes == "mixed" else 4
    alone = row * (known.group if Inputs.GROUPS in recipe.loss.inputs else 1)  # never divided
    tokens = min(max(token_limit(train, recipe.model, recipe.fabric), alone), everything)
    activations = max(_activations(known, model, tokens) for model in models)
    chosen = everything * 12.0 * recipe.loss.forward.teacher_top  # ids and log-probs of a teacher's most likely tokens
    gathered = known.policy.base * (2 if known.computes == "mixed" else 4) if known.shards > 1 else 0
    found = {
        "weights and optimizer": states / known.shards,
        "sampling, besides": kv_bytes(known.policy.config, cached, width) + gathered,
        "learning, besides": activations + gradients / known.shards + casts / known.shards + chosen,
    }
    if known.fuses:
        found["copies to sample through, on a GPU if they fit a quarter of it"] = float(known.policy.base * width)
    return {phase: size / 2**20 for phase, size in found.items()}


def optimizer_bytes(part: Optimizer, model: Size) -> float:
    """Return the bytes of an optimizer's state of a model.

    Raises:
        PartError: The part raised.
    """
    with calling(part, "make"):
        of = state_size(part)
    return sum(count * of(kind, shape) for (kind, shape), count in model.shapes.items())


def _activations(known: Setting, model: Size, tokens: int) -> float:
    """Return the bytes that a micro-batch leaves for the backward pass, with the largest chunk of its logits."""
    hidden = model.config.hidden_size
    layer, layers = activation_bytes(model.config, known.computes, model.lora > 0)
    if known.recipe.train.checkpoint_activations:  # each layer's input, and one layer computed again
        layer += layers * hidden * known.frozen if model.lora else layers * hidden * 4
        layers = 1
    logits = min(4 * tokens * model.outputs, CHUNK_BYTES)
    return float(tokens * layer * layers + 2 * logits)  # their gradient too
