"""Prompts that start episodes on an OpenEnv server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt

Rows = Annotated[int, Ge(1), Le(1_000_000), NUMBER]


class OpenEnvTask(Task):
    """Prompts that start episodes: each row has the same instructions and plays an episode of its own.

    Args:
        instructions: The system message: the rules, and how to write an action.
        rows: Training prompts.
        validation_rows: Validation prompts; their episodes have other seeds.
        resets: Arguments of the environment's reset besides the seed, which rows use in turn.
    """

    def __init__(
        self,
        instructions: str = "Answer each observation with one action and nothing else.",
        rows: Rows = 1000,
        validation_rows: Rows = 100,
        resets: list[dict[str, Any]] | None = None,
    ) -> None:
        self.instructions = instructions
        self.sizes = {"train": rows, "validation": validation_rows}
        self.resets = [{}] if resets is None else resets
        if not self.resets:
            raise RecipeError("OpenEnvTask has resets=[], expected arguments of a reset; leave it out for none")

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        resets = self.resets
        return [{"id": f"openenv-{split}-{i}", "reset": resets[i % len(resets)]} for i in range(self.sizes[split])]

    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        message = {"role": "system", "content": self.instructions}
        return Prompt(id=row["id"], messages=[message], meta={"reset": row["reset"]})
