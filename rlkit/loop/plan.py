"""Pre-flight: how a run's numbers work out, what memory it will take, and whether reward and template do their part."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from rlkit.errors import RolloutError
from rlkit.loop.data import Data
from rlkit.models.load import load_config
from rlkit.models.size import kv_bytes, parameters
from rlkit.types import Prompt, Score, StopReason, Trajectory, Turn

ADAM = 2
"""Moments that AdamW keeps of each trained parameter."""

Scorer = Callable[[Sequence[Trajectory]], Awaitable[list[Score]]]


def lines(data: Data, ranks: int = 1) -> Iterator[str]:
    """Say how batch sizes work out on so many data-parallel ranks, with the nearest even value where one is off."""
    recipe = data.recipe
    train, group, answer = recipe.train, recipe.rollout.group, recipe.rollout.sampling.max_tokens
    prompts, updates = train.prompts_per_step, train.minibatches * train.epochs
    passes = train.steps * prompts / len(data.train)
    yield (
        f"{train.steps} steps of {prompts} prompts x {group} samples = {prompts * group} trajectories, "
        f"{updates} optimizer step{'s' * (updates > 1)} each; {passes:.2f} passes over {len(data.train)} rows"
    )
    if prompts % train.minibatches:
        low = prompts // train.minibatches * train.minibatches
        yield (
            f"mini-batches are uneven: train.prompts_per_step is {prompts}, train.minibatches {train.minibatches}; "
            f"{low} or {low + train.minibatches} prompts would be even"
        )
    if ranks > 1:
        share = prompts / ranks
        yield f"{ranks} ranks: {share:g} prompts each" + (
            "" if share.is_integer() else ", on average: some learn from fewer"
        )
        if prompts % ranks:
            low = prompts // ranks * ranks
            yield f"{low or ranks} or {low + ranks} prompts a step would be even"
    longest = data.longest
    room = min(answer, data.context - longest)
    rows = max(1, train.micro_tokens // (longest + room))
    yield (
        f"longest prompt {longest} tokens, answers up to {answer}, context {data.context}"
        + ("" if room == answer else f": answers to it end after {room}")
    )
    if longest + room > train.micro_tokens:
        yield (
            f"the longest row has {longest + room} tokens, more than train.micro_tokens = {train.micro_tokens}: it is "
            f"learnt from alone, and takes the memory that it takes"
        )
    else:
        yield f"micro-batches of at most {train.micro_tokens} tokens: {rows} of the longest rows, more of shorter ones"


def memory(data: Data, ranks: int = 1, shards: int = 1) -> dict[str, float]:
    """Estimate a rank's memory in MiB by phase, in float32; what an engine's own server takes is not in it.

    Activations are those of Korthikanti et al. 2022 (arXiv:2205.05198, equation 2 without the attention matrix):
    34 bytes a token, layer and hidden unit in 16 bits, and twice that in float32; recomputed ones need a layer's alone.

    Args:
        data: With its recipe.
        ranks: Data-parallel ranks.
        shards: Ranks that a model's weights are divided among.
    """
    recipe = data.recipe
    config, train = load_config(recipe.model).get_text_config(), recipe.train
    base = parameters(recipe.model)
    lora = parameters(recipe.model, adapters=True) - base if recipe.model.lora is not None else 0
    critic = 0 if recipe.critic is None else base
    trained = (lora or base) + critic
    reference = base if recipe.needs_reference and not lora else 0
    states = base + lora + critic + reference + ADAM * trained + (trained - critic) * (train.ema is not None)
    row = min(data.longest + recipe.rollout.sampling.max_tokens, data.context)
    everything = -(-train.prompts_per_step // ranks) * recipe.rollout.group * row
    learnt = min(max(train.micro_tokens, row), everything)
    layers, width = config.num_hidden_layers, 34 if "16" in recipe.fabric.precision else 68
    kept = layers * width if not train.checkpoint_activations else width + layers * 4
    cached = min(getattr(recipe.rollout.engine, "max_kv_tokens", 0), everything)
    found = {
        "weights and optimizer": states * 4 / shards,
        "sampling, besides": kv_bytes(config, cached) + base * 4 * (shards > 1),
        "learning, besides": learnt * config.hidden_size * kept + trained * 4 / shards,
    }
    return {phase: size / 2**20 for phase, size in found.items()}


class Trial(NamedTuple):
    """What came of calling the reward before the run: a line to show, and whether it failed."""

    text: str
    failed: bool = False


async def try_reward(score: Scorer, prompt: Prompt) -> Trial:
    """Score the row's own answer and a wrong one."""
    try:
        right, other = await score([_answered(prompt, prompt.answer or ""), _answered(prompt, "I do not know.")])
    except RolloutError as error:  # a reward whose on_error is raise
        return Trial(str(error), failed=True)
    if right.reward is None or other.reward is None:
        return Trial(f"the reward fails on {prompt.id!r}: {right.error or other.error}", failed=True)
    told = f"reward: {right.reward:g} for the answer of {prompt.id!r}, {other.reward:g} for 'I do not know.'"
    return Trial(told if right.reward > other.reward else f"warning: {told}: it does not tell them apart")


def _answered(prompt: Prompt, text: str) -> Trajectory:
    turns = [Turn("user", 0, 1), Turn("assistant", 1, 2)]
    return Trajectory(prompt, 0, [0, 0], [False, True], [0.0, 0.0], [-1, 0], StopReason.STOP, turns, text)
