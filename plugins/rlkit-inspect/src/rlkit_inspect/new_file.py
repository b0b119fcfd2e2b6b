"""Files that a verb writes, and that must not exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from rlkit.base.errors import RecipeError
from rlkit.base.files import unwritable


@contextmanager
def new_file(name: str) -> Iterator[TextIO]:
    """Open a file that does not exist yet, to write it.

    Raises:
        RecipeError: It exists, or cannot be written.
    """
    path = Path(name)
    try:
        with path.open("x", encoding="utf-8", newline="") as file:
            try:
                yield file
                file.flush()
            except BaseException:
                path.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise RecipeError(f"{name!r} exists already; name a new file, or remove it first") from error
    except OSError as error:
        raise RecipeError(f"{name!r} cannot be written: {unwritable(error)}") from error
