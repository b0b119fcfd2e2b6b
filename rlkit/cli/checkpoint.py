"""The recipe that a verb takes of a run folder: `--allow-code`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.cli.parsing.compose import Composer
from rlkit.cli.parsing.objects import plain
from rlkit.cli.parsing.reader import read
from rlkit.recipe.trust import risk
from rlkit.registry import load_plugins

ALLOW_CODE: tuple[str, dict[str, object]] = (
    "--allow-code",
    {"action": "store_true", "help": "Trust a run folder's recipe: run its code, and send samples to its addresses."},
)


def with_recipe_of(home: Path, argv: Sequence[str]) -> list[str]:
    """Return the arguments with the recipe of a run folder, which may be a stranger's.

    Raises:
        RecipeError: The recipe runs code or names an address, and the user has not said that they trust it.
    """
    path = home / "recipe.yaml"
    if ALLOW_CODE[0] not in argv:
        composer = Composer(load_plugins())
        composer.add(read(path))  # a part may be written as text
        reason = risk(plain(composer.tree))
        if reason is not None:
            raise RecipeError(
                f"{path} has {reason}; rlkit asks for every run folder, as it may be a stranger's: if you trust it, "
                f"add {ALLOW_CODE[0]}, or name it yourself: --recipe {path}"
            )
    return ["--recipe", str(path), *argv]
