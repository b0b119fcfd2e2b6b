"""The length of a run: steps where the training files are on this machine, else passes over the data."""

from __future__ import annotations

import os
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit_convert.conversion import Conversion


def set_steps(conversion: Conversion, key: str, epochs: float, prompts: int, files: object) -> None:
    """Set `train.steps` for a number of epochs; `train.data_epochs` if the number of rows is unknown.

    Args:
        conversion: The conversion to add to.
        key: The peer's option that gives the epochs.
        epochs: Passes over the rows.
        prompts: Prompts of a step.
        files: The path or paths of the training files.
    """
    rows = count_rows(files)
    most = conversion.recipe.get("train.max_rows")
    if rows is not None and most is not None:
        rows = min(rows, int(most[0]))  # type: ignore[call-overload]
    if rows is None or rows < prompts:
        conversion.set("train.data_epochs", epochs, key)
        return
    steps = max(int(epochs * (rows // prompts)), 1)
    conversion.set("train.steps", steps, key)
    conversion.note(key, f"train.steps is {steps}: {rows:,} rows, {prompts} a step; fewer if some are too long")


def count_rows(files: object) -> int | None:
    """Return the number of rows in local files; None if one is missing or cannot be read."""
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
