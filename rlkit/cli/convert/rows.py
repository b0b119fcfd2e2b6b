"""The number of steps, where the data of a configuration are files on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from rlkit.cli.convert.table import Conversion
from rlkit.errors import RecipeError


def set_steps(found: Conversion, key: str, epochs: float, prompts: int, files: object) -> None:
    """Set `train.steps` for a number of epochs, which an option gives; list the option where rows are not known."""
    rows = count_rows(files)
    if rows is None or rows < prompts:
        known = "rows of the data" if rows is None else f"{rows} rows"
        found.note(key, f"train.steps = {epochs:g} epochs x {known} / {prompts} prompts; set it")
        return
    steps = max(int(epochs * (rows // prompts)), 1)
    found.set("train.steps", steps, key)
    found.note(key, f"train.steps is {steps}: {rows:,} rows, {prompts} a step; less what is dropped as too long")


def count_rows(files: object) -> int | None:
    """Return the rows of files on this machine; None where there are none, or they cannot be read."""
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    from rlkit.tasks import TRL

    names = [str(name) for name in files] if isinstance(files, list) else [str(files)]
    try:
        paths = [Path(os.path.expanduser(name)) for name in names]
        if not all(os.path.isfile(path) for path in paths):
            return None
        if all(path.suffix == ".parquet" for path in paths):
            return sum(int(read_metadata(path).num_rows) for path in paths)
        return len(TRL([str(path) for path in paths]).rows("train"))
    except (RecipeError, ArrowException, OSError, ValueError, RuntimeError):  # RuntimeError: an unknown ~user
        return None
