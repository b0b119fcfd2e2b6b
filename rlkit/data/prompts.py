"""From a task's rows to prompts: each made through one boundary, which refuses what a run cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlkit.base.errors import RecipeError
from rlkit.interfaces import outputs
from rlkit.interfaces.task import Split, Task
from rlkit.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.tasks.media import text_only
from rlkit.tasks.table import location_of
from rlkit.types import Prompt, Row


def make_prompt(task: Task, rows: Sequence[Row], index: int) -> Prompt:
    """Return the prompt of a row.

    Raises:
        RecipeError: The row is malformed, or holds images, videos or audio.
        PartError: The task raised something else, or what it returned is no prompt.
    """
    with calling(task, "prompt"):
        row = rows[index]
        prompt = task.prompt(row, index)
    require(task, "prompt", outputs.of_task(prompt))
    return text_only(prompt, row, f"task {type(task).__name__}, {location_of(row, f'row {index}')}")


def held_out(recipe: Recipe) -> list[Prompt]:
    """Return the validation prompts: those of the recipe's task, or those of `validation.tasks`, under their names."""
    if recipe.validation is None:
        return []
    if recipe.validation.tasks is None:
        return _held_out(recipe.task, recipe.validation.limit)
    return [
        replace(
            prompt,
            id=f"{name}/{prompt.id}",
            meta={**prompt.meta, "data_source": prompt.meta.get("data_source") or name},  # by which Router chooses
            source=name,
        )
        for name, task in recipe.validation.tasks.items()
        for prompt in _held_out(task or recipe.task, recipe.validation.limit)
    ]


def _held_out(task: Task, limit: int | None) -> list[Prompt]:
    rows = rows_of(task, "validation")
    return [make_prompt(task, rows, i) for i in range(min(limit or len(rows), len(rows)))]


def rows_of(task: Task, split: Split) -> Sequence[Row]:
    """Return the rows of a split.

    Raises:
        RecipeError: There are none.
    """
    with calling(task, "rows"):
        rows = task.rows(split)
    if len(rows) == 0:
        raise RecipeError(f"task {type(task).__name__} has no {split} rows, expected at least one")
    return rows
