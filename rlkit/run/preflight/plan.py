"""Pre-flight checks: batch sizes and lengths, and a trial call of the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from rlkit.base.errors import RecipeError, RolloutError, show
from rlkit.base.text import counted
from rlkit.data.data import Data
from rlkit.interfaces.content import described
from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.reward import RewardFunction, RewardManager
from rlkit.models.activations import precision_of
from rlkit.models.config import context_limit, load_config
from rlkit.models.size import find_config, size_of
from rlkit.models.source import source_of
from rlkit.recipe import Lora, Recipe, Train
from rlkit.rollout.service import RolloutService
from rlkit.run.preflight.structure_texts import structured_texts
from rlkit.train.replay import NO_EXPERTS, NO_SAMPLES, replay_problem
from rlkit.types import Prompt, Score, StopReason, Structure, Trajectory, Turn

MIN_LORA_RATE = 5e-6
"""The smallest useful learning rate of adapters, which need 10 to 20 times that of full fine-tuning."""

MAX_FULL_RATE = 5e-5
"""The highest learning rate that is plausible where all weights of a large model are trained."""
LARGE_MODEL = 100_000_000
"""Parameters of a model that is no toy."""

Scorer = Callable[[Sequence[Trajectory]], Awaitable[list[Score]]]


def lines(data: Data, ranks: int = 1, on_gpu: bool | None = None) -> Iterator[str]:
    """Yield batch sizes and lengths for a number of data-parallel ranks, and warnings about the recipe."""
    yield from batches(data.recipe, len(data.order.rows), ranks, on_gpu)
    limit = context_limit(load_config(data.recipe.model))
    if limit is not None:
        yield limit
    yield from lengths(data)
    for name, mixture in (data.recipe.mix or {}).items():
        if mixture.task is not None:
            recorded, train = data.mixtures[name], data.mixtures[name].recipe.train
            passes = _passes(train, len(recorded.order.rows))
            yield f"mix.{name}: {train.prompts_per_step} prompts a step with their recorded answers{passes}"
            yield from (f"mix.{name}: {line}" for line in lengths(recorded))


def _passes(train: Train, rows: int) -> str:
    return f"; {train.total_steps * train.prompts_per_step / rows:.2f} passes over {counted(rows, 'row')}"


def batches(recipe: Recipe, rows: int | None, ranks: int = 1, on_gpu: bool | None = None) -> Iterator[str]:
    """Yield what is trained and the batch sizes, with the nearest even value if one is uneven.

    Args:
        recipe: A checked recipe.
        rows: Number of training rows, if it is known.
        ranks: Number of data-parallel ranks.
        on_gpu: Whether a GPU is planned for; None to ask this machine.
    """
    train, prompts = recipe.train, recipe.train.prompts_per_step
    updates = train.minibatches * train.epochs
    details = f" = {prompts * recipe.rollout.group_size} trajectories"
    samples = recipe.method.completions.format(rollout=recipe.rollout, details=details)
    steps, passes = "steps", f"; {train.data_epochs} passes over the data"
    if train.steps is not None:
        steps = counted(train.steps, "step")
        passes = "" if rows is None else _passes(train, rows)
    yield from adapters(recipe)
    engine = recipe.rollout.engine
    if engine.chosen:
        yield f"engine: {type(engine).__name__}, {engine.chosen}; rollout.engine chooses another"
    yield from replay(recipe, on_gpu)
    if recipe.model.attention not in {"auto", "sdpa"}:
        yield f"attention: {recipe.model.attention}, which trains on padded rows; sdpa needs no padding"
    yield (f"{steps} of {counted(prompts, 'prompt')} {samples}, {counted(updates, 'optimizer step')} each{passes}")
    yield from _uncorrected(recipe, updates)
    if prompts % train.minibatches:
        low = prompts // train.minibatches * train.minibatches
        yield (
            f"mini-batches are uneven: train.prompts_per_step is {prompts}, train.minibatches {train.minibatches}; "
            f"{low} or {low + train.minibatches} prompts would be even"
        )
    if ranks > 1:
        share = prompts / ranks
        average = "" if share.is_integer() else ", on average: some train on fewer"
        yield f"{ranks} ranks: {share:g} prompts each{average}"
        if prompts % ranks:
            low = prompts // ranks * ranks
            yield f"{low or ranks} or {low + ranks} prompts a step would be even"


def replay(recipe: Recipe, on_gpu: bool | None = None) -> Iterator[str]:
    """Yield whether the experts that the engine selects are replayed in training, for a mixture of experts."""
    with suppress(RecipeError):  # reported when the model is loaded
        problem, source = replay_problem(recipe, on_gpu), type(recipe.engine).__name__
        how = f"replayed as {source} selects them, if the model's routers do so by topk (R3, arXiv:2510.11370)"
        if problem not in (NO_EXPERTS, NO_SAMPLES):
            yield f"experts: {how if problem is None else f'not replayed: {problem}'}"


def _uncorrected(recipe: Recipe, updates: int) -> Iterator[str]:
    """Warn of several updates from a rollout with a loss that reads neither the old policy nor a reference."""
    inputs = recipe.loss.inputs
    if Inputs.ADVANTAGES in inputs and not inputs & (Inputs.OLD_LOGPS | Inputs.REFERENCE) and updates > 1:
        yield (
            f"warning: loss {type(recipe.loss).__name__} does not correct for {updates} optimizer steps from a "
            "rollout, which can make the policy worse; choose ClipLoss, or set train.minibatches and train.epochs to 1"
        )


def adapters(recipe: Recipe) -> Iterator[str]:
    """Yield the source of the weights, unless it is a plain model; warn of learning rates too low for adapters."""
    source = source_of(recipe.model)
    if source.base is not None:
        treatment = "trained further" if recipe.model.lora is not None else "all weights are trained, adapters merged"
        yield f"policy: {source}; {treatment}"
        if source.lora is not None and recipe.model.lora is not None and recipe.needs_reference:
            yield (
                "warning: KL is measured against the base without the adapter; to measure it against the adapter as it "
                "is now, name the output of rlkit export --merge-lora in model.path"
            )
    rates: list[tuple[str, Lora | None, float]] = [("train.lr", recipe.model.lora, recipe.train.lr)]
    if recipe.critic is not None:
        rates.append(("critic.lr", recipe.critic.lora, recipe.critic.lr))
    for name, lora, rate in rates:
        if lora is not None and rate < MIN_LORA_RATE:
            yield (
                f"warning: {name} is {rate:g}, with which adapters hardly learn; set it to 1e-5 to 3e-5, as the recipe "
                "grpo_gsm8k_lora does"
            )


def large_model(recipe: Recipe, on_gpu: bool) -> Iterator[str]:
    """Yield warnings about a model whose weights are all trained, if it is large: its learning rate and precision.

    Args:
        recipe: A checked recipe.
        on_gpu: Whether a GPU trains it.
    """
    model, rates = recipe.model, {}
    if model.lora is None:
        rates["train.lr"] = recipe.train.lr
    if recipe.critic is not None and recipe.critic.lora is None:
        rates["critic.lr"] = recipe.critic.lr
    too_high = {name: rate for name, rate in rates.items() if rate > MAX_FULL_RATE}
    is_single = on_gpu and precision_of(model, recipe.fabric) == "float32"
    if not (too_high or is_single):
        return
    try:
        count = size_of(find_config(model), None, model.trust_remote_code, scores=model.scores).base
    except RecipeError:  # reported when the model is loaded
        return
    if count < LARGE_MODEL:
        return
    for name, rate in too_high.items():
        yield (
            f"warning: {name} is {rate:g}, expected at most {MAX_FULL_RATE:g} where all weights of a model of "
            f"{count / 1e6:,.0f}M parameters are trained; set it to 1e-6, or 1e-5 for supervised training"
        )
    if is_single:
        yield (
            f"warning: fabric.precision is {recipe.fabric.precision}, in which a GPU is several times slower and needs "
            "more memory; set fabric.precision: bf16-mixed"
        )


def lengths(data: Data) -> Iterator[str]:
    """Yield the lengths of prompts and answers, the context, and the size of micro-batches."""
    max_tokens, longest = data.recipe.rollout.sampling.max_tokens, data.longest
    row, limit = data.longest_row, data.token_limit
    rows = max(1, limit // row)
    if data.answers is not None:
        yield f"longest recorded answer {row} tokens with its prompt, context {data.dialogue.context}"
    else:
        end = "" if row == longest + max_tokens else f": answers to it end after {row - longest}"
        yield f"longest prompt {longest} tokens, answers up to {max_tokens}, context {data.dialogue.context}{end}"
    if data.overlong:
        treatment = "dropped" if data.recipe.rollout.overlong == "drop" else "shortened"
        yield f"{data.overlong:,} prompts of more than {data.lengths.limit} tokens are {treatment} (rollout.overlong)"
    if data.unscorable:
        yield f"warning: {data.unscorable}; they are dropped (rollout.unscorable)"
    unit, rows_per_unit = ("group", data.largest_group) if Inputs.GROUPS in data.recipe.loss.inputs else ("row", 1)
    unit_tokens = row * rows_per_unit
    if unit_tokens > limit:
        yield (
            f"the longest {unit} has {unit_tokens} tokens, more than train.max_tokens_per_micro_batch = {limit}: "
            "it is a micro-batch of its own, whatever memory that takes"
        )
    else:
        yield f"micro-batches of at most {limit} tokens: {rows} of the longest rows, more of shorter ones"


TRIED_ROWS = 3
"""Rows whose reference answers the reward is tried on."""


class Trial(NamedTuple):
    """The result of the trial calls of the reward: lines to show, and whether a call failed."""

    lines: list[str]
    failed: bool = False


def try_in_run(service: RolloutService, data: Data, reward: RewardManager) -> Trial:
    """Try a reward of a run on the first rows, on the run's event loop; see `try_reward`."""
    structure = data.recipe.rollout.sampling.structure
    return service.wait(try_reward(lambda t: service.score(reward, t), data.examples(TRIED_ROWS), structure))


async def try_reward(score: Scorer, prompts: Sequence[Prompt], structure: Structure | None = None) -> Trial:
    """Score the reference answer of each prompt and a wrong one; warn if the reward does not tell them apart.

    With a structure, both are texts that it allows. A reward that scores both 0 may expect a form that the answer
    lacks, so that is no warning.
    """
    answers = [prompt.answer or "" for prompt in prompts]
    texts = [(a, "I do not know.") if structure is None else structured_texts(structure, a) for a in answers]
    if None in texts:
        return Trial(["reward: not tried, since no short text follows rollout.sampling.structure"])
    tried = [pair for pair in texts if pair is not None]
    pairs = [[_trajectory(prompt, text) for text in pair] for prompt, pair in zip(prompts, tried, strict=True)]
    try:
        scores = await asyncio.gather(*map(score, pairs))
    except RolloutError as error:  # a reward whose on_error is raise
        return Trial([str(error)], failed=True)
    trial = Trial([])
    remarks: set[str] = set()
    for prompt, (text, wrong_text), (right, wrong) in zip(prompts, tried, scores, strict=True):
        if right.error is not None or wrong.error is not None:
            completion = text if right.error is not None else wrong_text
            line = f"the reward fails on {show(completion, 60)} in answer to {_question(prompt)}"
            return Trial([f"{line}: {right.error or wrong.error}"], failed=True)
        if right.reward is None or wrong.reward is None:
            trial.lines.append(f"reward: no opinion (None) on an answer to {_question(prompt)}")
            continue
        reference = "an empty answer" if prompt.answer is None else f"the reference answer {show(text, 60)}"
        wrong_answer = f"{wrong.reward:g} for {show(wrong_text, 60)}"
        line = f"reward: {right.reward:g} for {reference} to {_question(prompt)}, {wrong_answer}"
        remark = "" if prompt.answer is None else _remark(right.reward, wrong.reward)
        is_warning = remark and (right.reward < wrong.reward or right.reward > 0)
        trial.lines.append(f"{'warning: ' if is_warning else ''}{line}{'' if remark in remarks else remark}")
        remarks.add(remark)
    if scores and all(score.abstains for pair in scores for score in pair):
        trial.lines.append("warning: the reward has no opinion on any answer: it returned None instead of a number")
    return trial


def require_reward(trial: Trial, recipe: Recipe) -> None:
    """Refuse a run whose reward failed in its trial.

    Raises:
        RecipeError: The trial failed, and the recipe requires that it does not.
    """
    if recipe.reward is None or not trial.failed or not recipe.train.require_reward:
        return
    has_service = any(not isinstance(part, RewardFunction) for part in simple_rewards(recipe.reward))
    remedy = ", or set train.require_reward: false if its service starts later" if has_service else ""
    raise RecipeError(f"{trial.lines[0]}; fix it{remedy}")


def simple_rewards(reward: RewardManager) -> Iterator[RewardManager]:
    """Yield a reward, or the rewards inside of one that combines or chooses others.

    One that has an effect of its own beside those rewards, such as a rubric with a judge, is yielded after them.
    """
    values = [v for value in vars(reward).values() for v in (value.values() if isinstance(value, dict) else [value])]
    parts = [value for value in values if isinstance(value, RewardManager)]
    for part in parts:
        yield from simple_rewards(part)
    if not parts or reward.effect():
        yield reward


def _remark(right: float, wrong: float) -> str:
    """Return a remark on the rewards of a right and a wrong answer; empty if the right one earns more."""
    if right > wrong:
        return ""
    if right < wrong:
        return ": the wrong answer is scored higher"
    if right > 0:
        return ": both are scored alike"
    return ": fine if answers need words around the reference; otherwise the reward expects another form"


def _question(prompt: Prompt) -> str:
    """Return the last message of a prompt, quoted, for a line."""
    return show(described(prompt.messages[-1]["content"]) if prompt.messages else "", 60)


def _trajectory(prompt: Prompt, text: str) -> Trajectory:
    turns = [Turn("user", 0, 1), Turn("assistant", 1, 2)]
    return Trajectory(prompt, 0, [0, 0], [False, True], [0.0, 0.0], [-1, 0], StopReason.STOP, turns, text)
