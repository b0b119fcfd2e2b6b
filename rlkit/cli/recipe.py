"""`rlkit recipe list|show|new|check`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lightning.fabric import Fabric

from rlkit.base.errors import RecipeError, UnavailableError, show
from rlkit.base.installed import DISTRIBUTION
from rlkit.cli.parsing.annotate import annotated
from rlkit.cli.parsing.command_line import split
from rlkit.cli.parsing.own_recipe import own_recipe
from rlkit.cli.parsing.parser import Parsed, parse
from rlkit.cli.parsing.script import as_python
from rlkit.cli.streams import new_file
from rlkit.cli.views.display import echo, show_list
from rlkit.data.data import Data, load_data
from rlkit.distributed.fsdp2 import FSDP2Strategy, make_fabric
from rlkit.interfaces.reward import RewardManager
from rlkit.models.activations import token_limit
from rlkit.recipe import Recipe
from rlkit.registry import Registry, load_plugins
from rlkit.rewards import ModelReward, PythonReward
from rlkit.rollout.scoring import score
from rlkit.rollout.template_check import check_template
from rlkit.rollout.workers import Workers
from rlkit.run.preflight import estimate, footprint, plan
from rlkit.run.preflight.dryrun import dry_run
from rlkit.run.preflight.gpus import GPUS, Gpu, gpu_named
from rlkit.train.runtime import NoPolicyError, RuntimeWithoutPolicy
from rlkit.train.setup import fabric_for, prepare_training

USAGE = """usage: rlkit recipe list
           the shipped recipes, and those of plugins
       rlkit recipe show NAME [overrides]
           the recipe with every option filled in
       rlkit recipe show NAME --python
           a Python script that runs the same
       rlkit recipe new FILE --from NAME [overrides]
           a file of your own: every option, with what it does
       rlkit recipe new FILE --task mine.csv --reward reward.py:score
                [--model NAME]
           a short recipe for your rows, by their columns, and your function
       rlkit recipe check NAME [overrides]
           check it, its data, its model's context and template, its reward
       rlkit recipe check NAME --gpu h100
           whether it fits that GPU, and how long it takes; --price 2.5 for the
           cost
       rlkit recipe check NAME --deep
           load the models too, and measure a step that changes nothing
"""
FROM = "--from"

EXAMPLES = 64
"""Prompts that are measured for the mean length of all."""

LONGEST = 500
"""Characters of a recipe's summary."""

PROMPT = 128
"""Tokens of a prompt, as assumed where there is neither tokenizer nor data."""

PYTHON = ("--python", {"action": "store_true", "help": "Print a Python script that runs the same."})
DEEP = ("--deep", {"action": "store_true", "help": "Load models, run code of the user's, measure a step's memory."})
GPU = ("--gpu", {"help": f"Plan for this GPU: {', '.join(GPUS)}, or a number of MiB. This machine needs none."})
PRICE = ("--price", {"help": "Price of a GPU per hour, to estimate the cost of the run."})


def run(argv: Sequence[str]) -> int:
    """List, show, write or check; return the exit status."""
    verb, arguments = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if verb else 2
    if verb == "list":
        return _list(load_plugins())
    if verb == "new":
        return _new(arguments)
    if verb not in ("show", "check"):
        raise RecipeError(f"rlkit recipe has no verb {verb!r}, expected list, show, new or check")
    parsed = parse(f"recipe {verb}", arguments, [DEEP, GPU, PRICE] if verb == "check" else [PYTHON])
    if verb == "show":
        script = as_python(parsed.yaml, f"The recipe {parsed.name}.", parsed.registry)
        print(script if parsed.options.python else parsed.yaml, end="")
        return 0
    if parsed.recipe.model.trust_remote_code and not parsed.options.deep:
        raise RecipeError(
            f"model.trust_remote_code is true: to check the model would run the code that comes with "
            f"{parsed.recipe.model.path!r}; read it, and add --deep to run it"
        )
    target = Target.of(parsed)
    try:
        data = load_data(target.recipe)
    except UnavailableError as error:
        return _check_without_data(target, error)
    return _check(target, data)


@dataclass(frozen=True)
class Target:
    """What is checked, and the GPU that it is planned for.

    Args:
        recipe: With the micro-batches of that GPU.
        deep: Whether models are loaded.
        gpu: None for this machine's device.
        price: Price of a GPU per hour, if it was given.
    """

    recipe: Recipe
    deep: bool
    gpu: Gpu | None
    price: float | None

    @classmethod
    def of(cls, parsed: Parsed) -> Target:
        """Return what the command line asks about.

        Raises:
            RecipeError: The GPU is unknown, its price is no price, or `--deep` is to measure on another machine.
        """
        recipe, options = parsed.recipe, parsed.options
        price = None if options.price is None else _price(options.price)
        if options.gpu is None:
            return cls(recipe, options.deep, None, price)
        if options.deep:
            raise RecipeError("--deep measures on this machine, and --gpu plans for another; choose one of them")
        gpu = gpu_named(options.gpu)
        try:
            limit = token_limit(recipe.train, recipe.model, recipe.fabric, gpu.memory)
        except UnavailableError:  # said once the data is loaded
            return cls(recipe, False, gpu, price)
        train = replace(recipe.train, max_tokens_per_micro_batch=limit)
        return cls(replace(recipe, train=train), False, gpu, price)

    def fabric(self) -> Fabric:
        """Return the recipe's Fabric, on this machine's CPU if it is planned for a GPU elsewhere."""
        section = self.recipe.fabric
        if self.gpu is None:
            return fabric_for(self.recipe)
        devices = len(section.devices) if isinstance(section.devices, list) else section.devices
        elsewhere = replace(section, accelerator="cpu", devices=1 if devices == "auto" else devices)
        return make_fabric(elsewhere, self.recipe.train.deadline)


def _price(text: str) -> float:
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 < price < math.inf:
        raise RecipeError(f"--price is {show(text)}, expected the price of a GPU per hour, such as 2.5")
    return price


def _new(argv: Sequence[str]) -> int:
    """Write a recipe with every option to a file that does not exist yet."""
    if any(word in ("-h", "--help") for word in argv):
        print(USAGE, end="")
        return 0
    file, words_after = (argv[0], list(argv[1:])) if argv and not argv[0].startswith("-") else ("", list(argv))
    if not file:
        raise RecipeError("rlkit recipe new needs a file to write: rlkit recipe new mine.yaml --from grpo_gsm8k")
    text = _of_own_data(words_after) if _names_own_data(words_after) else _with_every_option(words_after)
    with new_file(file) as out:
        out.write(text)
    echo(f"{file}: change what you like, then rlkit recipe check {file}, and rlkit fit --recipe {file}")
    return 0


def _with_every_option(argv: Sequence[str]) -> str:
    words = [("--recipe" + word.removeprefix(FROM)) if word.partition("=")[0] == FROM else word for word in argv]
    if not any(word.partition("=")[0] == "--recipe" for word in words):
        raise RecipeError(
            f"rlkit recipe new needs {FROM} NAME, the recipe to begin with (see rlkit recipe list), or your data and "
            "reward: --task mine.csv --reward reward.py:score"
        )
    parsed = parse("recipe new", words, [])
    header = f"# {FROM.lstrip('-')} {parsed.name}: every option, as it is there"
    return f"{header}\n\n{annotated(parsed.yaml, parsed.registry)}"


def _names_own_data(argv: Sequence[str]) -> bool:
    """Whether the words name a file of rows, and no recipe to begin with."""
    options = [word.partition("=")[0] for word in argv]
    return "--task" in options and not {FROM, "--recipe"}.intersection(options)


def _of_own_data(argv: Sequence[str]) -> str:
    line = split(argv, [("--task", {}), ("--reward", {}), ("--model", {})])
    options = line.options
    if line.problems or line.overrides or line.recipes or options.task is None or options.reward is None:
        raise RecipeError(
            "rlkit recipe new with --task FILE takes --reward FILE.py:FUNCTION and --model NAME; change the rest in "
            "the file that it writes"
        )
    return own_recipe(options.task, options.reward, options.model or "tiny")


def _list(registry: Registry) -> int:
    rows = []
    for name, (path, plugin) in sorted(registry.recipes.items()):
        source = "" if plugin.distribution == DISTRIBUTION else f" (from {plugin.distribution})"
        rows.append((name, f"{_summary(path)}{source}"))
    show_list(rows)
    for plugin in registry.plugins:
        if plugin.error is not None:
            echo(f"note: {plugin} cannot be loaded, nor its recipes be listed; see rlkit plugins list")
    return 0


def _summary(path: Path) -> str:
    """Return the first sentence of the comment with which a recipe begins."""
    try:
        with path.open(encoding="utf-8") as file:
            line = file.readline(LONGEST).strip().lstrip("# ")
        sentence, dot, _ = line.partition(". ")
        return sentence + "." if dot else line
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"


def _check(target: Target, data: Data) -> int:
    recipe = target.recipe
    fabric = target.fabric()
    ranks, shards = _ranks(fabric)
    for line in plan.lines(data, ranks):
        echo(line)
    template_check = check_template(data.dialogue.template)
    for fact in template_check.facts:
        echo(f"template: {fact}")
    for warning in template_check.warnings:
        echo(f"warning: {warning}")
    measured = [data.lengths.measure([prompt])[0] for prompt in data.examples(EXAMPLES)]
    prompt = sum(measured) / len(measured)
    fits = _estimate(target, estimate.setting(recipe, prompt, data.longest, ranks, shards, answers=data.answers))
    if target.deep:  # agreed: from the command line
        _measure(recipe, data, fabric)
    elif recipe.reward is not None:
        _try_reward(recipe, recipe.reward, data, fabric)
    prompts = f"{len(data.train)} training rows, {len(data.validation)} validation prompts"
    if not fits:
        return _too_large(target)
    echo(f"ok: {prompts}, context {data.dialogue.context}")
    return 0


def _too_large(target: Target) -> int:
    """Print that the run does not fit the GPU; return the exit status."""
    name = "the GPU" if target.gpu is None else target.gpu.name
    echo(f"error: the run does not fit {name}; see above what would make it fit")
    return 1


def _try_reward(recipe: Recipe, reward: RewardManager, data: Data, fabric: Fabric) -> None:
    reason = _untried(reward)
    if reason:
        echo(f"reward: not tried, since it {reason}; add --deep to try it")
        return
    workers = Workers(1)
    try:
        reward.bind(RuntimeWithoutPolicy(recipe, fabric, workers))
        _show(asyncio.run(plan.try_reward(lambda t: score(reward, t, workers), data.examples(plan.TRIED_ROWS))))
    except NoPolicyError as error:
        echo(f"reward: not tried, since it asks for {error}; add --deep to try it")
    finally:
        workers.close()


def _untried(reward: RewardManager) -> str | None:
    """Return why a reward, or one inside of it, is not to be called without being asked to; None if it may be."""
    if isinstance(reward, PythonReward):
        return f"runs {reward.function}"
    if isinstance(reward, ModelReward):
        return f"loads {reward.path}"
    parts = [v for value in vars(reward).values() for v in (value.values() if isinstance(value, dict) else [value])]
    reasons = (_untried(part) for part in parts if isinstance(part, RewardManager))
    return next(filter(None, reasons), None)


def _check_without_data(target: Target, missing: UnavailableError) -> int:
    """Check and estimate what can be without a model or data that this machine does not have."""
    recipe = target.recipe
    if target.deep:
        raise missing
    ranks, shards = _ranks(target.fabric())
    unknown = {str(missing)}
    rows = None
    try:
        rows = len(recipe.task.rows("train"))
    except UnavailableError as error:
        unknown.add(str(error))
    for line in plan.batches(recipe, rows, ranks):
        echo(line)
    try:
        fits = _estimate(target, estimate.setting(recipe, PROMPT, PROMPT, ranks, shards))
        echo(f"prompts were taken to have {PROMPT} tokens")
    except UnavailableError as error:
        fits = None
        unknown.add(str(error))
    for what in sorted(unknown):
        echo(f"not checked: {what}")
    echo("not checked: prompt lengths, the chat template and the reward, which need both the model and the data")
    if fits is False:
        return _too_large(target)
    echo("ok, as far as it could be checked" + ("" if fits else "; memory was not, since the model is unknown here"))
    return 0


def _ranks(fabric: Fabric) -> tuple[int, int]:
    """Return the number of data-parallel ranks, and of those that weights are divided among."""
    ranks = fabric.world_size
    return ranks // getattr(fabric.strategy, "tensor_parallel", 1), ranks if isinstance(
        fabric.strategy, FSDP2Strategy
    ) else 1


def _estimate(target: Target, setting: estimate.Setting) -> bool:
    """Print what a step takes; return whether it fits the GPU that is asked about."""
    setting = replace(setting, gpu=target.gpu)
    for line in (*estimate.lines(setting), *footprint.lines(setting)):
        echo(line)
    gpu, steps = setting.timed_gpu, target.recipe.train.steps
    if target.price is None or gpu is None:
        return footprint.fits(setting)
    seconds = estimate.step_seconds(setting, gpu)
    gpu_hours = (seconds.sampling + seconds.learning) * steps / 3600 * setting.ranks
    echo(f"cost, estimated: {gpu_hours:.1f} GPU hours at {target.price:g} = {gpu_hours * target.price:,.2f}")
    return footprint.fits(setting)


def _measure(recipe: Recipe, data: Data, fabric: Fabric) -> None:
    """Load the models, try the reward and the longest rows."""
    fabric.launch()
    context, reward, trial = prepare_training(recipe, data, fabric), recipe.reward, None
    try:
        if reward is not None:
            trial = context.rollouts.wait(
                plan.try_reward(lambda t: context.rollouts.score(reward, t), data.examples(plan.TRIED_ROWS))
            )
        measured = dry_run(context)
    finally:
        context.rollouts.close()
    if fabric.is_global_zero:
        if trial is not None:
            _show(trial)
        for phase, size in measured.items():
            print(f"memory, measured: {size:,.0f} MiB at most, after {phase}")


def _show(trial: plan.Trial) -> None:
    for line in trial.lines:
        echo(f"warning: {line}" if trial.failed else line)
