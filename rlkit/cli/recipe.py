"""`rlkit recipe list|show|new|check`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.fabric import Fabric

from rlkit.base.errors import RecipeError, UnavailableError
from rlkit.base.installed import DISTRIBUTION
from rlkit.base.text import counted
from rlkit.cli.display import echo, show, show_list
from rlkit.cli.parsing.annotate import annotated
from rlkit.cli.parsing.own_recipe import SAVINGS, own_recipe
from rlkit.cli.parsing.parser import parse, split
from rlkit.cli.parsing.script import as_python
from rlkit.cli.streams import new_file
from rlkit.data.data import Data, load_data
from rlkit.distributed.fsdp2 import FSDP2Strategy
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe import Recipe
from rlkit.registry import Registry, load_plugins
from rlkit.rollout.scoring import score
from rlkit.rollout.template_check import check_template
from rlkit.rollout.workers import Workers
from rlkit.run.preflight import estimate, footprint, plan
from rlkit.run.preflight.adapter_check import check_adapters
from rlkit.run.preflight.dryrun import dry_run
from rlkit.run.preflight.gpus import GPUS
from rlkit.run.preflight.target import Target
from rlkit.train.runtime import NoPolicyError, RuntimeWithoutPolicy
from rlkit.train.setup import prepare_training

USAGE = """usage: rlkit recipe list
           the shipped recipes, and those of plugins
       rlkit recipe show NAME [overrides]
           the recipe with every option filled in
       rlkit recipe show NAME --python
           a Python script that runs the same
       rlkit recipe new FILE --from NAME [overrides]
           a file of your own: every option, with what it does
       rlkit recipe new FILE --task mine.csv --reward reward.py:score
                [--model NAME] [--gpu 24GB]
           a short recipe for your rows, by their columns, and your function,
           or a reward of rlkit's: --reward MathReward --reward.OPTION=VALUE;
           with LoRA where all weights do not fit the GPU
       rlkit recipe check NAME [overrides]
           check it, its data, its model's context and template, its reward
       rlkit recipe check NAME --gpu h100
           whether it fits that GPU, how long it takes; its cost by --price 2.5
       rlkit recipe check NAME --deep
           load the models too, and measure a step that changes nothing
"""
SENTENCE_END = re.compile(r"(?<=\.)(?<!\bDr\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bvs\.) ")
"""The space between two sentences; abbreviations end none."""
LONGEST = 500
"""Characters of a recipe's summary."""

FROM = "--from"

GPU = (
    "--gpu",
    {"help": f"Plan for this GPU: {', '.join(GPUS)}, or its memory, such as 24GB. This machine needs none."},
)

PROMPT = 128
"""Tokens of a prompt, as assumed where there is neither tokenizer nor data."""

EXAMPLES = 64
"""Prompts that are measured for the mean length of all."""
PYTHON = ("--python", {"action": "store_true", "help": "Print a Python script that runs the same."})
DEEP = ("--deep", {"action": "store_true", "help": "Load models, run code of the user's, measure a step's memory."})
PRICE = ("--price", {"help": "Price of a GPU per hour, to estimate the cost of the run."})


def run(argv: Sequence[str]) -> int:
    """List, show, write or check; return the exit status."""
    verb, arguments = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("", "-h", "--help") or (verb == "new" and {"-h", "--help"}.intersection(arguments)):
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
        if parsed.options.python:
            print(as_python(parsed.yaml, f"The recipe {parsed.name}.", parsed.registry), end="")
        else:
            print(parsed.yaml, end="")
        return 0
    if parsed.recipe.model.trust_remote_code and not parsed.options.deep:
        raise RecipeError(
            f"model.trust_remote_code is true: to check the model would run the code that comes with "
            f"{parsed.recipe.model.path!r}; read it, and add --deep to run it"
        )
    options = parsed.options
    target = Target.of(parsed.recipe, options.deep, options.gpu, options.price)
    try:
        data = load_data(target.recipe)
    except UnavailableError as error:
        return _check_without_data(target, error)
    return _check(target, data)


def _new(argv: Sequence[str]) -> int:
    """Write a recipe to a file that does not exist yet."""
    file, words_after = (argv[0], list(argv[1:])) if argv and not argv[0].startswith("-") else ("", list(argv))
    if not file:
        raise RecipeError("rlkit recipe new needs a file to write: rlkit recipe new mine.yaml --from grpo_gsm8k")
    text, gpu = _of_own_data(words_after) if _names_own_data(words_after) else (_with_every_option(words_after), "")
    with new_file(file) as out:
        out.write(text)
    echo(f"{file}: change what you like, then rlkit recipe check {file}{gpu}, and rlkit fit --recipe {file}")
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


def _of_own_data(argv: Sequence[str]) -> tuple[str, str]:
    """Return a recipe for the user's rows, and the words by which `recipe check` plans for the GPU."""
    line = split(argv, [("--task", {}), ("--reward", {}), ("--model", {}), GPU])
    options = line.options
    reward_options = [(key, value) for key, value in line.overrides if key.startswith("reward.")]
    has_stray_words = line.problems or line.recipes or len(reward_options) < len(line.overrides)
    if has_stray_words or options.task is None or options.reward is None:
        raise RecipeError(
            "rlkit recipe new with --task FILE takes --reward FILE.py:FUNCTION, or --reward NAME with "
            "--reward.OPTION=VALUE, --model NAME and --gpu 24GB; change the rest in the file that it writes"
        )
    model = options.model or "tiny"
    texts = [own_recipe(options.task, options.reward, model, reward_options, saving) for saving in SAVINGS]
    if options.gpu is not None:
        return _fitting(texts, model, options.gpu), f" --gpu {options.gpu}"
    return texts[0], "" if options.model is None else " --gpu GB (your GPU's memory, such as 24GB)"


def _fitting(texts: Sequence[str], model: str, gpu: str) -> str:
    """Return the first of several recipes that fits a GPU, and say what it saves memory by.

    Raises:
        RecipeError: None fits, or the model's shape is unknown.
    """
    lengths: tuple[float, int] | None = None
    first_misfit = misfit = ""
    for text, saving in zip(texts, SAVINGS, strict=True):
        if "quantization" in saving.model and find_spec("bitsandbytes") is None:
            continue  # `misfit` names it as a remedy
        target = Target.of(_parsed(text, gpu), False, gpu, None)
        lengths = lengths or _prompt_tokens(target.recipe)
        setting = replace(estimate.setting(target.recipe, *lengths), gpu=target.gpu)
        misfit = footprint.misfit(setting) or ""
        first_misfit = first_misfit or misfit.partition(";")[0]
        if not misfit:
            if first_misfit:
                echo(f"{saving.name}: if all weights of {model} are trained, {first_misfit}")
            return text
    raise RecipeError(f"{misfit}; take a smaller model, or a GPU with more memory")


def _parsed(text: str, gpu: str) -> Recipe:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return parse("recipe new", ["--recipe", str(path), "--gpu", gpu], [GPU]).recipe


def _prompt_tokens(recipe: Recipe) -> tuple[float, int]:
    """Return the mean and the greatest number of tokens of a prompt; without tokenizer or data, those assumed."""
    try:
        data = load_data(recipe)
    except UnavailableError:
        return PROMPT, PROMPT
    return _mean_tokens(data), data.longest


def _mean_tokens(data: Data) -> float:
    """Return the mean number of tokens of a sample of the prompts."""
    measured = [data.lengths.measure([prompt])[0] for prompt in data.examples(EXAMPLES)]
    return sum(measured) / len(measured)


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
    """Return the first sentence of the comment with which a recipe begins; `Dr.` and the like end none."""
    try:
        with path.open(encoding="utf-8") as file:
            line = file.readline(LONGEST).strip().lstrip("# ")
        return SENTENCE_END.split(line, maxsplit=1)[0]
    except (OSError, ValueError) as error:
        return f"cannot be read: {error}"


def _check(target: Target, data: Data) -> int:
    recipe = target.recipe
    fabric = target.fabric()
    ranks, shards = _ranks(fabric)
    model_lines = (*plan.large_model(recipe, target.is_gpu(fabric)), *check_adapters(recipe.model))
    for line in (*plan.lines(data, ranks), *model_lines):
        echo(line)
    template_check = check_template(data.dialogue.template)
    for fact in template_check.facts:
        echo(f"template: {fact}")
    for warning in (*template_check.warnings, *data.dialogue.warnings):
        echo(f"warning: {warning}")
    prompt = _mean_tokens(data)
    misfit = _estimate(target, estimate.setting(recipe, prompt, data.longest, ranks, shards, answers=data.answers))
    if target.deep:  # agreed: from the command line
        _measure(recipe, data, fabric)
    elif recipe.trial_reward is not None:
        _try_reward(recipe, recipe.trial_reward, data, fabric)
    prompts = f"{counted(data.row_count, 'training row')}, {counted(len(data.validation), 'validation prompt')}"
    return _verdict(f"ok: {prompts}, context {data.dialogue.context}", misfit)


def _verdict(ok: str, misfit: str | None) -> int:
    """Print the last line, and return the exit status: 1 if the run does not fit the GPU."""
    if misfit is None:
        echo(ok)
        return 0
    echo(f"error: {misfit}", error=True)
    return 1


def _try_reward(recipe: Recipe, reward: RewardManager, data: Data, fabric: Fabric) -> None:
    reason = _untried(reward)
    if reason:
        echo(f"reward: not tried, since it {reason}; add --deep to try it")
        return
    workers = Workers(1)
    try:
        reward.bind(RuntimeWithoutPolicy(recipe, fabric, workers))
        structure = recipe.rollout.sampling.structure
        trial = asyncio.run(
            plan.try_reward(lambda t: score(reward, t, workers), data.examples(plan.TRIED_ROWS), structure)
        )
    except NoPolicyError as error:
        echo(f"reward: not tried, since it asks for {error}; add --deep to try it")
        return
    finally:
        workers.close()
    _show(trial, recipe)


def _untried(reward: RewardManager) -> str | None:
    """Explain why a reward, or one inside of it, is not to be called without being asked to; None if it may be."""
    return next(filter(None, (part.effect() for part in plan.simple_rewards(reward))), None)


def _check_without_data(target: Target, missing: UnavailableError) -> int:
    """Check and estimate what can be without a model or data that this machine does not have."""
    recipe = target.recipe
    if target.deep:
        raise missing
    fabric = target.fabric()
    ranks, shards = _ranks(fabric)
    unknown = {str(missing)}
    rows = misfit = None
    ok = "ok, as far as it could be checked"
    try:
        rows = len(recipe.task.rows("train"))
        rows = min(rows, recipe.train.max_rows or rows)
        recipe.train.set_steps(rows)
    except UnavailableError as error:
        unknown.add(str(error))
    for line in (*plan.batches(recipe, rows, ranks), *plan.large_model(recipe, target.is_gpu(fabric))):
        echo(line)
    try:
        for line in check_adapters(recipe.model):
            echo(line)
        misfit = _estimate(target, estimate.setting(recipe, PROMPT, PROMPT, ranks, shards))
        echo(f"prompts were taken to have {PROMPT} tokens")
    except UnavailableError as error:
        unknown.add(str(error))
        ok += "; memory and time were not estimated, since the shape of a model is unknown without its config.json"
    for what in sorted(unknown):
        echo(f"not checked: {what}")
    echo("not checked: prompt lengths, the chat template and the reward, which need both the model and the data")
    return _verdict(ok, misfit)


def _ranks(fabric: Fabric) -> tuple[int, int]:
    """Return the number of data-parallel ranks, and of those that weights are divided among."""
    ranks, strategy = fabric.world_size, fabric.strategy
    if not isinstance(strategy, FSDP2Strategy):
        return ranks, 1
    return ranks // (strategy.tensor_parallel * strategy.sequence_parallel), ranks // strategy.replicate


def _estimate(target: Target, setting: estimate.Setting) -> str | None:
    """Print memory, time and cost; return why the run does not fit the GPU that is planned for, if it does not."""
    setting = replace(setting, gpu=target.gpu)
    for line in estimate.lines(setting):
        echo(line)
    table = footprint.table(setting)
    show(("memory of each rank, estimated", table.unit), table.rows)
    for line in footprint.lines(setting):
        echo(line)
    gpu, steps = setting.timed_gpu, target.recipe.train.steps
    if target.price is not None and gpu is not None and steps is not None:
        seconds = estimate.step_seconds(setting, gpu)
        gpu_hours = (seconds.sampling + seconds.learning) * steps / 3600 * setting.ranks
        gpu_hours *= target.recipe.fabric.sequence_parallel
        echo(f"cost, estimated: {gpu_hours:.1f} GPU hours at {target.price:g} = {gpu_hours * target.price:,.2f}")
    return footprint.misfit(setting)


def _measure(recipe: Recipe, data: Data, fabric: Fabric) -> None:
    """Load the models, try the reward and the longest rows."""
    fabric.launch()
    context, reward, trial = prepare_training(recipe, data, fabric), recipe.trial_reward, None
    try:
        if reward is not None:
            trial = context.rollouts.wait(
                plan.try_reward(
                    lambda t: context.rollouts.score(reward, t),
                    data.examples(plan.TRIED_ROWS),
                    recipe.rollout.sampling.structure,
                )
            )
        measured = dry_run(context)
    finally:
        context.rollouts.close()
    if fabric.is_global_zero:
        if trial is not None:
            _show(trial, recipe)
        for phase, size in measured.items():
            print(f"memory, measured: {size:,.0f} MiB at most, after {phase}")


def _show(trial: plan.Trial, recipe: Recipe) -> None:
    """Show what the reward did; refuse the recipe where a run would be refused."""
    plan.require_reward(trial, recipe)
    for line in trial.lines:
        echo(f"warning: {line}" if trial.failed else line)
