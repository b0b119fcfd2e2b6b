"""`rlkit recipe new`: a file with every option of a recipe, or a short one for rows and a reward of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from rlkit.base.errors import RecipeError, UnavailableError
from rlkit.cli.parsing.annotate import annotated
from rlkit.cli.parsing.command_line import split
from rlkit.cli.parsing.own_recipe import SAVINGS, own_recipe
from rlkit.cli.parsing.parser import parse
from rlkit.cli.streams import new_file
from rlkit.cli.views.display import echo
from rlkit.data.data import Data, load_data
from rlkit.recipe import Recipe
from rlkit.run.preflight import estimate, footprint
from rlkit.run.preflight.gpus import GPUS
from rlkit.run.preflight.target import Target

FROM = "--from"

GPU = (
    "--gpu",
    {"help": f"Plan for this GPU: {', '.join(GPUS)}, or its memory, such as 24GB. This machine needs none."},
)

PROMPT = 128
"""Tokens of a prompt, as assumed where there is neither tokenizer nor data."""

EXAMPLES = 64
"""Prompts that are measured for the mean length of all."""


def new_recipe(argv: Sequence[str]) -> int:
    """Write a recipe to a file that does not exist yet."""
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
    line = split(argv, [("--task", {}), ("--reward", {}), ("--model", {}), GPU])
    options = line.options
    reward_options = [(key, value) for key, value in line.overrides if key.startswith("reward.")]
    others = line.problems or line.recipes or len(reward_options) < len(line.overrides)
    if others or options.task is None or options.reward is None:
        raise RecipeError(
            "rlkit recipe new with --task FILE takes --reward FILE.py:FUNCTION, or --reward NAME with "
            "--reward.OPTION=VALUE, --model NAME and --gpu NAME; change the rest in the file that it writes"
        )
    model = options.model or "tiny"
    texts = [own_recipe(options.task, options.reward, model, reward_options, saving) for saving in SAVINGS]
    return texts[0] if options.gpu is None else _fitting(texts, model, options.gpu)


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
                echo(f"{saving.name}, for with all weights of {model} {first_misfit}")
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
    return mean_tokens(data), data.longest


def mean_tokens(data: Data) -> float:
    """Return the mean number of tokens of a sample of the prompts."""
    measured = [data.lengths.measure([prompt])[0] for prompt in data.examples(EXAMPLES)]
    return sum(measured) / len(measured)
