"""Several tasks as one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from rlkit.base.errors import RecipeError
from rlkit.base.names import Name
from rlkit.base.ranges import PositiveFloat
from rlkit.interfaces.rows import INDEX, ROW, TASK
from rlkit.interfaces.task import Split, Task
from rlkit.registry import calling, close_parts
from rlkit.types import Prompt, Row


class Mix(Task):
    """The prompts of several tasks, mixed.

    Each prompt's `data_source` is the name of its task here, by which `Router` chooses its reward and validation shows
    accuracies; one that the task had set before is left in `meta` as `row_source`.

    With weights, an epoch is the shortest in which the tasks have these shares and no row is left out: rows of tasks
    that are small for their weight come several times. Validation has the rows of all tasks, once each.

    Args:
        tasks: Tasks by name.
        weights: The share of each task among the training prompts, relative to the others; null for shares by size.
    """

    def __init__(self, tasks: dict[Name, Task], weights: dict[str, PositiveFloat] | None = None) -> None:
        if not tasks:
            raise RecipeError("Mix has no tasks, expected at least one: tasks: {gsm8k: GSM8K}")
        if weights is not None and weights.keys() != tasks.keys():
            raise RecipeError(
                f"Mix has weights for {', '.join(weights) or 'nothing'}, expected one for each task: {', '.join(tasks)}"
            )
        self.tasks = tasks
        self.weights = weights

    def close(self) -> None:
        close_parts(list(self.tasks.values()))

    def rows(self, split: Split) -> Sequence[Row]:
        rows_of: dict[str, Sequence[Row]] = {}
        for name, task in self.tasks.items():
            with calling(task, "rows"):
                rows_of[name] = task.rows(split)
            if not len(rows_of[name]):
                raise RecipeError(f"task {name!r} of Mix has no {split} rows, expected at least one")
        return MixedRows(rows_of, self.weights if split == "train" else None)

    def prompt(self, row: Row, index: int) -> Prompt:
        name = row[TASK]
        with calling(self.tasks[name], "prompt"):
            prompt = self.tasks[name].prompt(row[ROW], row[INDEX])
        source = prompt.meta.get("data_source")
        row_source = {} if source is None else {"row_source": source}
        return replace(prompt, id=f"{name}/{prompt.id}", meta={**prompt.meta, **row_source, "data_source": name})


class MixedRows(Sequence[Row]):
    """The rows of several tasks, one task after the other, those of small ones repeated as their weights ask for.

    Args:
        sources: Rows by the task's name; none is empty.
        weights: By the task's name; None repeats nothing.
    """

    def __init__(self, sources: Mapping[str, Sequence[Row]], weights: Mapping[str, float] | None) -> None:
        self.sources = sources
        sizes = {name: len(rows) for name, rows in sources.items()}
        if weights is not None:
            scale = max(size / weights[name] for name, size in sizes.items())
            sizes = {name: max(size, round(scale * weights[name])) for name, size in sizes.items()}
        self._ends = list(accumulate(sizes.values()))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if not 0 <= index < len(self):
            raise IndexError(index)
        location = bisect_right(self._ends, index)
        name, rows = list(self.sources.items())[location]
        within = (index - (self._ends[location - 1] if location else 0)) % len(rows)
        return {TASK: name, INDEX: within, ROW: rows[within]}
