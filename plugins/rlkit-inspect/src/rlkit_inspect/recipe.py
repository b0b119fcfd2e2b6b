"""`rlkit recipe list|show|new|check`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlkit.base.errors import RecipeError
from rlkit.base.installed import DISTRIBUTION
from rlkit.base.terminal import echo, printable
from rlkit.commands import parse, split
from rlkit.registry import Registry, load_plugins
from rlkit_inspect.annotate import annotated
from rlkit_inspect.gpus import GPUS
from rlkit_inspect.new_file import new_file
from rlkit_inspect.own_recipe import SAVINGS, misread_header, own_recipe, recorded_recipe
from rlkit_inspect.script import as_python

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
       rlkit recipe new FILE --task answers.jsonl [--model NAME] [--gpu 24GB]
           a recipe for the completions in your rows: DPO, KTO or SFT
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

GPU = ("--gpu", {"help": f"Plan for this GPU, which need not be here: {', '.join(GPUS)}, or its memory, such as 24GB."})
PYTHON = ("--python", {"action": "store_true", "help": "Print a Python script that runs the same."})
DEEP = ("--deep", {"action": "store_true", "help": "Load models, run code of the user's, measure a step's memory."})
PRICE = ("--price", {"help": "Price of a GPU per hour, to estimate the cost of the run."})


def run(argv: Sequence[str]) -> int:
    """List, show, write or check; return the exit status."""
    verb, arguments = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("", "-h", "--help") or (verb == "new" and not {"-h", "--help"}.isdisjoint(arguments)):
        print(USAGE, end="")
        return 0 if verb else 2
    if verb == "list":
        return _list(load_plugins())
    if verb == "new":
        return _new(arguments)
    if verb not in ("show", "check"):
        raise RecipeError(f"rlkit recipe has no verb {verb!r}, expected list, show, new or check")
    is_check = verb == "check"
    parsed = parse(f"recipe {verb}", arguments, [DEEP, GPU, PRICE] if is_check else [PYTHON], needs_files=is_check)
    if verb == "show":
        script = as_python(parsed.yaml, f"The recipe {parsed.name}.", parsed.registry) if parsed.options.python else ""
        print(script or parsed.yaml, end="")
        return 0
    from rlkit_inspect.check import check_recipe

    return check_recipe(parsed)


def _new(argv: Sequence[str]) -> int:
    """Write a recipe to a file that does not exist yet."""
    file, words_after = (argv[0], list(argv[1:])) if argv and not argv[0].startswith("-") else ("", list(argv))
    if not file:
        raise RecipeError("rlkit recipe new needs a file to write: rlkit recipe new mine.yaml --from grpo_gsm8k")
    options = {word.partition("=")[0] for word in words_after}
    is_of_own_data = "--task" in options and not {FROM, "--recipe"} & options
    text, gpu = _of_own_data(words_after) if is_of_own_data else (_with_every_option(words_after), "")
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


def _of_own_data(argv: Sequence[str]) -> tuple[str, str]:
    """Return a recipe for the user's rows, and the words by which `recipe check` plans for the GPU."""
    line = split(argv, [("--task", {}), ("--reward", {}), ("--model", {}), GPU])
    options = line.options
    reward_options = [(key, value) for key, value in line.overrides if key.startswith("reward.")]
    has_stray_words = line.problems or line.recipes or len(reward_options) < len(line.overrides)
    if has_stray_words or options.task is None or (options.reward is None and reward_options):
        raise RecipeError(
            "\n".join(line.problems)
            or "rlkit recipe new with --task FILE takes --reward FILE.py:FUNCTION, or --reward NAME with "
            "--reward.OPTION=VALUE, --model NAME and --gpu 24GB; change the rest in the file that it writes"
        )
    if sum(word == "--reward" or word.startswith("--reward=") for word in argv) > 1:
        raise RecipeError(
            "--reward is given twice, expected one; several are a Composite, to be written in the file (rlkit docs "
            "data-and-rewards)"
        )
    model = options.model or "tiny"
    if options.reward is None:
        texts = [recorded_recipe(options.task, model, saving) for saving in SAVINGS]
    else:
        texts = [own_recipe(options.task, options.reward, model, reward_options, saving) for saving in SAVINGS]
    problem = misread_header(options.task)
    if problem is not None:
        echo(f"warning: {problem}")
    if options.gpu is None:
        return texts[0], "" if options.model is None else " --gpu 24GB (your GPU's memory)"
    from rlkit_inspect.check import first_that_fits

    return first_that_fits(texts, model, options.gpu), f" --gpu {options.gpu}"


def _list(registry: Registry) -> int:
    rows = []
    for name, (path, plugin) in sorted(registry.recipes.items()):
        source = "" if plugin.distribution == DISTRIBUTION else f" (from {plugin.distribution})"
        rows.append((name, f"{_summary(path)}{source}"))
    _show_list(rows)
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


def _show_list(rows: Iterable[tuple[str, str]]) -> None:
    """Print names with their descriptions: a line each, which a terminal wraps beside the names."""
    console, entries = Console(), [(printable(name), printable(text)) for name, text in rows]
    if not console.is_terminal:
        width = max((len(name) for name, _ in entries), default=0)
        for name, text in entries:
            print(f"{name:<{width}} {text}")
        return
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 1))
    for name, text in entries:
        table.add_row(Text(name), Text(text))
    console.print(table)
