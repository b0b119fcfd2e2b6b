"""The tasks of an environment of verifiers as rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER
from rlkit.interfaces.task import Split, Task
from rlkit.types import Message, Prompt, Row
from rlkit_env_verifiers.environments import load

if TYPE_CHECKING:
    from verifiers.v1 import TaskData

Rows = Annotated[int, Ge(1), Le(1_000_000), NUMBER]


class VerifiersTask(Task):
    """The tasks of an environment of verifiers, for `VerifiersAgent` and `VerifiersReward`.

    The last `validation_rows` tasks are held out, unless `validation` says which tasks are for validation.

    Args:
        environment: The name of an installed taskset, such as `gsm8k`, or the configuration of an environment:
            `{taskset: {id: gsm8k, split: train}, agent: {max_turns: 4}}`.
        allow_code: Must be true, since the environment's code runs.
        rows: Training tasks; null for all.
        validation_rows: Validation tasks.
        validation: Options of the taskset that differ for validation, such as `{split: test}`.
    """

    def __init__(
        self,
        environment: str | dict[str, Any],
        allow_code: bool = False,
        *,
        rows: Rows | None = None,
        validation_rows: Rows = 100,
        validation: dict[str, Any] | None = None,
    ) -> None:
        self.environment = {"taskset": {"id": environment}} if isinstance(environment, str) else environment
        self.name = (self.environment.get("taskset") or {}).get("id")
        if not isinstance(self.name, str) or not self.name:
            raise RecipeError(f"VerifiersTask has environment={environment!r}, expected a taskset's name at taskset.id")
        self.allow_code = allow_code
        if not self.allow_code:
            raise RecipeError(
                f"VerifiersTask names {self.name!r}, whose code would run; set allow_code: true if you trust it"
            )
        self.train_rows = rows
        self.validation_rows = validation_rows
        self.validation = validation

    def rows(self, split: Split) -> Sequence[Row]:
        if self.validation is not None and split == "validation":
            taskset = {**self.environment["taskset"], **self.validation}
            return self._read({**self.environment, "taskset": taskset}, self.validation_rows)
        if self.validation is not None:
            return self._read(self.environment, self.train_rows)
        total = None if self.train_rows is None else self.train_rows + self.validation_rows
        rows = self._read(self.environment, total)
        if len(rows) <= self.validation_rows:
            raise RecipeError(
                f"{self.name} has {len(rows)} tasks, of which validation_rows={self.validation_rows} would be held "
                "out; lower it, or set `validation` to other tasks"
            )
        return rows[: -self.validation_rows] if split == "train" else rows[-self.validation_rows :]

    def _read(self, config: dict[str, Any], limit: int | None) -> list[Row]:
        key, environment = load(config, limit)
        return [
            {
                "id": f"{environment.name}-{index}",
                "messages": messages_of(task.data),
                "answer": getattr(task.data, "answer", None),
                "meta": {"data_source": environment.name, "environment": key, "index": index},
            }
            for index, task in enumerate(environment.tasks)
        ]

    def prompt(self, row: Row, index: int) -> Prompt:
        answer = row["answer"]
        return Prompt(row["id"], row["messages"], answer if isinstance(answer, str) else None, row["meta"])


def messages_of(data: TaskData) -> list[Message]:
    """Return the policy's first messages; later ones of the environment are not known yet."""
    system = [] if data.system_prompt is None else [{"role": "system", "content": data.system_prompt}]
    if isinstance(data.prompt, str):
        return [*system, {"role": "user", "content": data.prompt}]
    if data.prompt:
        return [*system, *(message.model_dump(exclude_none=True) for message in data.prompt)]
    return system or [{"role": "user", "content": data.description or data.name or ""}]
