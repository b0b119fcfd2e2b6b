"""A task that is a class in a file of the user's."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from rlkit.base.errors import RecipeError, explain_foreign, show
from rlkit.base.functions import load_once, require_function
from rlkit.interfaces.task import Split, Task
from rlkit.registry import calling, close_parts
from rlkit.types import JsonObject, Prompt, Row


class PythonTask(Task):
    """The rows and prompts of a `Task` class in a Python file.

    Its code runs wherever rows are read: in `recipe check` and `data show`, too.

    Args:
        function: `file.py:name` or `package.module:name` of a subclass of `rlkit.interfaces.task.Task`.
        allow_code: Must be true, since the recipe runs the class's code.
        options: The arguments of its constructor by name.
    """

    def __init__(self, function: str, allow_code: bool = False, options: JsonObject | None = None) -> None:
        self.allow_code = allow_code
        require_function("PythonTask", function, self.allow_code)
        self.function = function
        self.options = options

    @cached_property
    def _task(self) -> Task:
        try:
            task = load_once(self.function)(**(self.options or {}))
        except Exception as error:  # the user's code may raise anything
            raise RecipeError(f"PythonTask has function={self.function!r}: {explain_foreign(error)}") from error
        if not isinstance(task, Task):
            raise RecipeError(
                f"PythonTask has function={self.function!r}, which returns {show(task)}, expected a subclass of "
                "rlkit.interfaces.task.Task: rlkit docs plugins/task"
            )
        return task

    def rows(self, split: Split) -> Sequence[Row]:
        with calling(self._task, "rows"):
            return self._task.rows(split)

    def prompt(self, row: Row, index: int) -> Prompt:
        with calling(self._task, "prompt"):
            return self._task.prompt(row, index)

    def close(self) -> None:
        if "_task" in vars(self):
            close_parts([self._task])
