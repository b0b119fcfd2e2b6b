"""A verb of the command line: `rlkit rows --recipe quickstart --first 3` prints training rows of a recipe's task.

    [project.entry-points."rlkit.commands"]
    rows = "rlkit_rows:run"

`rlkit --help` lists it; its module is imported when the verb is used.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlkit.base.errors import RecipeError
from rlkit.commands import parse

FIRST = ("--first", {"metavar": "COUNT", "default": "1", "help": "How many rows are printed."})


def run(argv: Sequence[str]) -> int:
    """Print rows; return the exit status. `argv` is what follows the verb."""
    parsed = parse("rows", argv, [FIRST])  # a recipe with its overrides, as for `rlkit fit`, and the verb's own option
    first = parsed.options.first
    if not first.isdecimal():
        raise RecipeError(f"--first is {first!r}, expected a whole number")
    rows = parsed.recipe.task.rows("train")
    for index in range(min(int(first), len(rows))):
        print(parsed.recipe.task.prompt(rows[index], index).messages)
    print(f"{len(rows)} rows")
    return 0
