"""From a task's rows to prompts: each made through one boundary, which refuses what a run cannot read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlkit.base.errors import RecipeError, with_definition
from rlkit.base.text import part_name
from rlkit.data.media import text_only, with_pictures
from rlkit.interfaces import outputs
from rlkit.interfaces.rows import location_of
from rlkit.interfaces.task import Split, Task
from rlkit.recipe import Recipe
from rlkit.registry import calling, require
from rlkit.types import Prompt, Row


def make_prompt(
    task: Task, rows: Sequence[Row], index: int, *, pictures: bool = False, sources: Sequence[str] = ()
) -> Prompt:
    """Return the prompt of a row.

    Args:
        task: Makes the prompt.
        rows: Of a split of the task.
        index: Of the row.
        pictures: Whether the policy reads pictures.
        sources: Where the row may name pictures, as `model.vision.sources` has them.

    Raises:
        RecipeError: The row is malformed, or holds media that the policy does not read.
        PartError: The task raised something else, or what it returned is no prompt.
    """
    with calling(task, "prompt"):
        row = rows[index]
        prompt = task.prompt(row, index)
    require(task, "prompt", outputs.of_task(prompt))
    location = f"task {type(task).__name__}, {location_of(row, f'row {index}')}"
    return with_pictures(prompt, row, location, sources) if pictures else text_only(prompt, row, location)


def held_out(recipe: Recipe, *, pictures: bool = False) -> list[Prompt]:
    """Return the validation prompts: those of the recipe's task, or those of `validation.tasks`, under their names.

    Args:
        recipe: Checked.
        pictures: Whether the policy reads pictures.
    """
    if recipe.validation is None:
        return []
    if recipe.validation.tasks is None:
        return _held_out(recipe.task, recipe, pictures)
    return [
        replace(
            prompt,
            id=f"{name}/{prompt.id}",
            meta={**prompt.meta, "data_source": prompt.meta.get("data_source") or name},  # by which Router chooses
            source=name,
        )
        for name, task in recipe.validation.tasks.items()
        for prompt in _held_out(task or recipe.task, recipe, pictures)
    ]


def _held_out(task: Task, recipe: Recipe, pictures: bool) -> list[Prompt]:
    rows, sources = rows_of(task, "validation"), recipe.model.vision.sources
    limit = (recipe.validation and recipe.validation.limit) or len(rows)
    return [make_prompt(task, rows, i, pictures=pictures, sources=sources) for i in range(min(limit, len(rows)))]


def rows_of(task: Task, split: Split) -> Sequence[Row]:
    """Return the rows of a split.

    Raises:
        RecipeError: There are none.
    """
    with calling(task, "rows"):
        rows = task.rows(split)
    require(task, "rows", outputs.of_rows(rows))
    if len(rows) == 0:
        problem = f"task {part_name(task)} has no {split} rows, expected at least one"
        raise RecipeError(with_definition(problem, task, "rows"))
    return rows


def check_ids(task: Task, prompts: Sequence[Prompt]) -> None:
    """Refuse prompts that all have one id, by which logs and random numbers tell them apart.

    Raises:
        PartError: They have.
    """
    if len(prompts) > 1 and len({prompt.id for prompt in prompts}) == 1:
        problem = f"gave all {len(prompts)} prompts the id {prompts[0].id!r}, expected an id of its own for each row"
        require(task, "prompt", f"{problem}: write str(index), or remove the column `id` if the rows have one")
