"""`rlkit data prepare|show|stats`: write a task's prompts to files; show some as the policy reads them; count them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from rlkit.cli.data.show import show
from rlkit.cli.data.stats import stats
from rlkit.cli.display import echo
from rlkit.cli.parsing.parser import Parsed, parse
from rlkit.cli.without_policy import bound_without_policy
from rlkit.errors import RecipeError
from rlkit.interfaces.task import Split, Task
from rlkit.models.load import context_length, load_config, load_tokenizer, stop_ids
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.rollout.participants import Participants
from rlkit.train.data import Data, held_out, make_prompt

USAGE = """usage: rlkit data show --recipe NAME [overrides]     three training prompts as the policy reads them
       rlkit data stats --recipe NAME [overrides]    lengths in tokens, sources, duplicates, overlap of the splits
       rlkit data prepare --recipe NAME --out DIR [overrides]
    prepare writes DIR/train.jsonl and DIR/validation.jsonl, which the task Jsonl reads:
    rlkit fit --recipe NAME --task Jsonl --task.path DIR/train.jsonl --task.validation_path DIR/validation.jsonl
"""
OUT: tuple[str, dict[str, Any]] = ("--out", {"type": str, "help": "The folder to write to."})
JSON: tuple[str, dict[str, Any]] = ("--json", {"action": "store_true", "help": "Print JSON instead of text."})


def run(argv: Sequence[str]) -> int:
    """Prepare, show or count; return the exit status."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    if argv[0] not in ("prepare", "show", "stats"):
        raise RecipeError(f"rlkit data has no verb {argv[0]!r}, expected prepare, show or stats")
    parsed = parse(f"data {argv[0]}", argv[1:], [OUT if argv[0] == "prepare" else JSON])
    if argv[0] == "prepare":
        return _prepare(parsed)
    with unchecked_data(parsed.recipe) as data:
        (show if argv[0] == "show" else stats)(data, parsed.options.json)
    return 0


def _prepare(parsed: Parsed) -> int:
    if parsed.options.out is None:
        raise RecipeError("rlkit data prepare needs --out DIR, the folder to write to")
    out = Path(parsed.options.out)
    out.mkdir(parents=True, exist_ok=True)
    splits: list[Split] = ["train", "validation"] if parsed.recipe.validation is not None else ["train"]
    for split in splits:
        count = write(parsed.recipe.task, split, out / f"{split}.jsonl")
        echo(f"{out / f'{split}.jsonl'}: {count} prompts")
    return 0


@contextmanager
def unchecked_data(recipe: Recipe) -> Iterator[Data]:
    """Load tokenizer and prompts as a run does, with its tools, but whatever their lengths; no weights are loaded.

    Raises:
        RecipeError: There are no rows, or a row cannot become a prompt.
    """
    with calling(recipe.task, "rows"):
        rows = recipe.task.rows("train")
    if len(rows) == 0:
        raise RecipeError(f"task {type(recipe.task).__name__} has no train rows, expected at least one")
    tokenizer = load_tokenizer(recipe.model)
    context = context_length(load_config(recipe.model)) - recipe.rollout.engine.reserved
    data = Data(tokenizer, context, recipe, rows, held_out(recipe), stop_ids(recipe.model, tokenizer))
    data.show = Console(stderr=True).is_terminal
    with ExitStack() as stack:
        if recipe.tools:  # some describe themselves only once they are bound
            stack.enter_context(bound_without_policy(recipe, *recipe.tools.values()))
            data.participants = Participants(recipe.tools)
        yield data


def write(task: Task, split: Split, path: Path) -> int:
    """Write a split as the task `Jsonl` reads it; return the number of prompts."""
    with calling(task, "rows"):
        rows = task.rows(split)
    with path.open("w", encoding="utf-8") as lines:
        for index in range(len(rows)):
            prompt = make_prompt(task, rows, index)
            row = {**prompt.meta, "id": prompt.id, "prompt": prompt.messages, "answer": prompt.answer}
            lines.write(json.dumps(row, ensure_ascii=False, default=str) + "\n")
    return len(rows)
