"""`rlkit data prepare`: write a task's prompts to files, so that runs need no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from rlkit.base.errors import RecipeError
from rlkit.cli.views.display import echo
from rlkit.data.prompts import make_prompt
from rlkit.interfaces.task import Split, Task
from rlkit.recipe import Recipe
from rlkit.registry import calling
from rlkit.types import JsonObject, Prompt


def prepare(recipe: Recipe, out: Path) -> None:
    """Write `train.jsonl` and `validation.jsonl`, each only once it is complete.

    Raises:
        RecipeError: The folder cannot be written, or a row cannot become a prompt.
    """
    splits: list[Split] = ["train", "validation"] if recipe.validation is not None else ["train"]
    for split in splits:
        path = out / f"{split}.jsonl"
        try:
            out.mkdir(parents=True, exist_ok=True)
            count = write(recipe.task, split, path)
        except OSError as error:
            raise RecipeError(f"--out is {str(out)!r}, which cannot be written: {error}") from error
        echo(f"{path}: {count:,} prompts")


def write(task: Task, split: Split, path: Path) -> int:
    """Write a split as the task `Jsonl` reads it, with progress on a terminal; return the number of prompts."""
    with calling(task, "rows"):
        rows = task.rows(split)
    beside, console = path.with_suffix(".partial"), Console(stderr=True)
    try:
        with (
            beside.open("w", encoding="utf-8") as lines,
            Progress(console=console, transient=True, disable=not console.is_terminal) as bar,
        ):
            for index in bar.track(range(len(rows)), description=f"writing {split}"):
                row = as_row(make_prompt(task, rows, index))
                lines.write(json.dumps(row, ensure_ascii=False, allow_nan=False, default=str) + "\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return len(rows)


def as_row(prompt: Prompt) -> JsonObject:
    """Return a prompt as a row from which `Jsonl` makes the same one."""
    row = {**prompt.meta, "id": prompt.id, "prompt": prompt.messages, "answer": prompt.answer}
    if prompt.tools is not None:
        arguments = prompt.meta.get("tools")
        of_tools = arguments if isinstance(arguments, Mapping) else {}
        row["tools"] = {name: of_tools.get(name, {}) for name in prompt.tools}
    return {key: _plain(value) for key, value in row.items()}


def _plain(value: object) -> object:
    """Return a value without NaN and infinities, which JSON has not."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
