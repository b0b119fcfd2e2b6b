"""What both games share: rows that start a game, and numbers that derive from a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt

Rows = Annotated[int, Ge(1), Le(1_000_000), NUMBER]


def draw(count: int, seed: int, purpose: str) -> int:
    """Return a number from 0 to `count` - 1 that depends on nothing but the arguments."""
    digest = hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % count


class GameTask(Task):
    """Many starts of one kind of game; rows differ by their id, and the seed of an episode says which game it is.

    `game` is what the policy is told first, `meta` what the environment reads of the prompt.
    """

    def __init__(self, game: str, meta: Mapping[str, Any], rows: int, validation_rows: int) -> None:
        self.game = game
        self.meta = meta
        self.sizes = {"train": rows, "validation": validation_rows}

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        return [{"id": f"{self.game}-{split}-{i}"} for i in range(self.sizes[split])]

    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        return Prompt(id=row["id"], messages=[{"role": "system", "content": self.game}], meta=self.meta)


def read_meta(prompt: Prompt, names: Sequence[str], task: str) -> list[Any]:
    """Return the values of the prompt's game.

    Raises:
        RecipeError: Something is missing.
    """
    if missing := [name for name in names if name not in prompt.meta]:
        raise RecipeError(
            f"the meta of prompt {prompt.id!r} has {', '.join(prompt.meta) or 'nothing'}, expected also "
            f"{', '.join(missing)}; use `task: {task}`, or rows with these keys"
        )
    return [prompt.meta[name] for name in names]
