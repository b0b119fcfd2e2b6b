"""Parts of a recipe that several peers set alike: the length of a run, its loggers, and which tokens it samples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.recipe.checks import MOST_CANDIDATES
from rlkit_convert.conversion import Conversion
from rlkit_convert.values import integer, number, text

PROJECT_LOGGERS = {
    "wandb": ("Wandb", "project"), "trackio": ("Trackio", "project"), "swanlab": ("SwanLab", "project"),
    "clearml": ("ClearML", "project"), "tensorboard": ("TensorBoard", ""),
}  # fmt: skip
"""rlkit's classes of loggers and their options of the project, by the names that the peers have for them."""
NO_LOGGER = (
    "{!r} is not a logger of rlkit's; expected Wandb, TensorBoard, MLflow, Trackio, SwanLab, ClearML, CSV, or one from "
    "a plugin"
)


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


def loggers(
    conversion: Conversion, key: str, classes: Mapping[str, tuple[str, str]], project: tuple[str, str], run_name: str
) -> None:
    """Set the loggers; metrics.jsonl and the terminal are always written.

    Args:
        conversion: The conversion to add to.
        key: The peer's option that lists loggers.
        classes: rlkit's class and its option of the project by the peer's name; both may be empty.
        project: The peer's option of the project, and its default.
        run_name: The peer's option of the run's name.
    """
    project_key, default = project
    targets = conversion.raw(key, [])
    parts = []
    for target in targets if isinstance(targets, list) else [targets]:
        logger, project_option = classes.get(str(target), (None, ""))
        options: dict[str, str | None] = {}
        if project_option and not conversion.is_unknown(project_key):
            options[project_option] = conversion.get(project_key, text, default)
        if project_option and not conversion.is_unknown(run_name):
            options["name"] = conversion.get(run_name, text, "") or None
        if logger is None:
            conversion.note(key, NO_LOGGER.format(target))
        elif logger:
            parts.append({"class_path": logger, "init_args": options})
    if parts:
        names = [name for name in (project_key, run_name) if not conversion.is_unknown(name)]
        conversion.set("log.loggers", parts, key, *names)


def truncation(conversion: Conversion, prefix: str = "") -> None:
    """Set which tokens training may sample; rlkit needs `top_k` beside `top_p` and `min_p`.

    Args:
        conversion: The conversion to add to.
        prefix: Of the peer's names.
    """
    keys = {name: f"{prefix}{name}" for name in ("top_p", "top_k", "min_p")}
    top_p, min_p = conversion.get(keys["top_p"], number, 1.0), conversion.get(keys["min_p"], number, 0.0)
    top_k = max(conversion.get(keys["top_k"], integer, 0), 0)
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if conversion.has(keys[name]):
            conversion.set(f"rollout.sampling.{name}", value, keys[name])
    needed = top_p < 1 or min_p > 0
    if conversion.has(keys["top_k"]) or needed:
        limit = min(top_k or (MOST_CANDIDATES if needed else 0), MOST_CANDIDATES)
        conversion.set("rollout.sampling.top_k", limit, *keys.values())
        if limit != top_k:
            source = next(key for key in keys.values() if conversion.has(key))
            conversion.note(source, f"training keeps at most the {limit} likeliest tokens: rollout.sampling.top_k")
