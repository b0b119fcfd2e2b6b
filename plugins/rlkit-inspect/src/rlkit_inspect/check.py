"""`rlkit recipe check`: what can be known of a run before it, and whether it fits a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from lightning.fabric import Fabric
from rlkit_placement.checks import refuse_pictures

from rlkit.api import checks
from rlkit.api.policy import check_template
from rlkit.api.prompts import Data, load_data
from rlkit.base.errors import RecipeError, UnavailableError
from rlkit.base.terminal import echo, show
from rlkit.base.text import counted
from rlkit.commands import Parsed, parse
from rlkit.distributed.fsdp2 import FSDP2Strategy
from rlkit.interfaces.reward import RewardManager
from rlkit.recipe import Recipe
from rlkit_inspect import estimate, footprint
from rlkit_inspect.gpus import GPUS
from rlkit_inspect.own_recipe import SAVINGS
from rlkit_inspect.pools import memory_of_pools, process_counts
from rlkit_inspect.recipe import GPU
from rlkit_inspect.target import Target

PROMPT = 128
"""Tokens of a prompt, as assumed where there is neither tokenizer nor data."""
EXAMPLES = 64
"""Prompts that are measured for the mean length of all."""


def check_recipe(parsed: Parsed) -> int:
    """Check a recipe, with its data where they are there; return the exit status."""
    if parsed.recipe.model.trust_remote_code and not parsed.options.deep:
        raise RecipeError(
            f"model.trust_remote_code is true: to check the model would run the code that comes with "
            f"{parsed.recipe.model.path!r}; read it, and add --deep to run it"
        )
    if parsed.recipe.placement is not None:
        with suppress(UnavailableError):  # said once the data is loaded
            refuse_pictures(parsed.recipe)
    options = parsed.options
    target = Target.of(parsed.recipe, options.deep, options.gpu, options.price)
    try:
        data = load_data(target.recipe)
    except UnavailableError as error:
        return _check_without_data(target, error)
    return _check(target, data)


def first_that_fits(texts: Sequence[str], model: str, gpu: str) -> str:
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


def _check(target: Target, data: Data) -> int:
    recipe = target.recipe
    fabric = target.fabric()
    ranks, shards = _ranks(fabric)
    on_gpu = target.is_gpu(fabric)
    for line in [*checks.describe_run(data, ranks, on_gpu)]:
        echo(line)
    if recipe.tools and data.dialogue.parser is None:
        raise RecipeError(data.dialogue.missing_parser)
    template_check = check_template(data.dialogue.template)
    for fact in template_check.facts:
        echo(f"template: {fact}")
    for warning in (*template_check.warnings, *data.dialogue.warnings):
        echo(f"warning: {warning}")
    prompt = _mean_tokens(data)
    misfit = _estimate(target, estimate.setting(recipe, prompt, data.longest, ranks, shards, answers=data.answers))
    if target.deep:  # agreed: from the command line
        _measure(data, fabric)
    elif recipe.trial_reward is not None:
        _try_reward(recipe.trial_reward, data, fabric)
    prompts = f"{counted(data.row_count, 'training row')}, {counted(len(data.validation), 'validation prompt')}"
    return _verdict(f"ok: {prompts}, context {data.dialogue.context}", misfit)


def _verdict(ok: str, misfit: str | None) -> int:
    """Print the last line, and return the exit status: 1 if the run does not fit the GPU."""
    if misfit is None:
        echo(ok)
        return 0
    echo(f"error: {misfit}", error=True)
    return 1


def _try_reward(reward: RewardManager, data: Data, fabric: Fabric) -> None:
    trial = checks.try_reward(data, reward, fabric)
    if isinstance(trial, str):
        echo(f"reward: not tried, since it {trial}; add --deep to try it")
    else:
        _show(trial, data.recipe)


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
    on_gpu = target.is_gpu(fabric)
    for line in [*checks.describe_batches(recipe, rows, ranks, on_gpu)]:
        echo(line)
    try:
        for line in checks.check_adapters(recipe.model):
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
    pools = [*memory_of_pools(setting)]
    for pool in pools:
        table = pool.table()
        header = f"memory of each rank of pool {pool.name} ({', '.join(pool.roles)}), estimated"
        show((header, table.unit), table.rows)
    counts = process_counts(setting)
    if pools:
        unit = "GPUs" if setting.gpu is not None else "processes"
        parts = ", ".join(f"{count} for {name}" for name, count in counts.items())
        echo(f"{unit} in all: {sum(counts.values())}, of which {parts}")
    if target.price is not None:
        echo(f"cost, {_cost(setting, target.price, sum(counts.values()))}")
    misfits = [footprint.misfit(setting), *(pool.misfit() for pool in pools)]
    return "; ".join(filter(None, misfits)) or None


def _cost(setting: estimate.Setting, price: float, gpus: int) -> str:
    """Return the GPU hours of the run and their cost, or the reason why they are unknown."""
    gpu, steps = setting.timed_gpu, setting.recipe.train.steps
    if steps is None:
        return "not estimated: train.steps is null"
    if gpu is None:
        return f"not estimated: it needs the speed of the GPU, which is known of --gpu {', '.join(GPUS)}"
    seconds = estimate.step_seconds(setting, gpu)
    gpu_hours = (seconds.sampling + seconds.learning) * steps / 3600 * gpus
    return f"estimated: {gpu_hours:.1f} GPU hours at {price:g} = {gpu_hours * price:,.2f}"


def _measure(data: Data, fabric: Fabric) -> None:
    """Load the models, try the reward and the longest rows."""
    fabric.launch()
    trial, measured = checks.measure_step(data, fabric)
    if fabric.is_global_zero:
        if trial is not None:
            _show(trial, data.recipe)
        for phase, size in measured.items():
            print(f"memory, measured: {size:,.0f} MiB at most, after {phase}")


def _show(trial: checks.Trial, recipe: Recipe) -> None:
    """Show what the reward did; refuse the recipe where a run would be refused."""
    checks.require_reward(trial, recipe)
    for line in trial.lines:
        echo(f"warning: {line}" if trial.failed else line)
