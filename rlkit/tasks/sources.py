"""Reading rows from files and from the Hugging Face hub."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from rlkit.errors import RecipeError

Rows = Sequence[Mapping[str, Any]]


def existing(path: Path, option: str) -> Path:
    """Give the path if something is there.

    Raises:
        RecipeError: Nothing is; the message names the option that gave the path, and what is near.
    """
    path = path.expanduser()
    if path.exists():
        return path
    parent = path.absolute().parent
    while not parent.exists():
        parent = parent.parent
    near = ", ".join(sorted(p.name for p in parent.iterdir())[:8]) or "nothing"
    raise RecipeError(f"{option} is {str(path)!r}, which does not exist; {parent} holds: {near}")


def jsonl(path: Path, fields: Sequence[str]) -> Rows:
    """Read a file with one JSON object a line, each of which must have the fields.

    Raises:
        RecipeError: A line is not such an object; the message gives its number.
    """
    rows = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise RecipeError(f"{path}, line {number}: not JSON ({error}); expected one object a line") from error
            missing = [f for f in fields if not isinstance(row, dict) or f not in row]
            if missing:
                has = ", ".join(row) if isinstance(row, dict) else f"a {type(row).__name__}"
                raise RecipeError(f"{path}, line {number}: no field {missing[0]!r}; the line has: {has}")
            rows.append(row)
    return rows


def files(paths: Sequence[Path], option: str) -> Rows:
    """Read parquet, JSON lines or CSV files through `datasets`; rows are read from disk when asked for.

    Raises:
        RecipeError: A file is missing, of another kind, or unreadable.
    """
    kinds = {".parquet": "parquet", ".jsonl": "json", ".json": "json", ".csv": "csv"}
    for path in paths:
        existing(path, option)
        if path.suffix not in kinds:
            raise RecipeError(f"{option} names {path.name!r}, expected a file ending in {', '.join(kinds)}")
    import datasets

    try:
        loaded = datasets.load_dataset(kinds[paths[0].suffix], data_files=[str(p) for p in paths], split="train")
    except Exception as error:
        raise RecipeError(f"{option}: {paths[0]} cannot be read: {error}") from error
    return cast(Rows, loaded)


def hub(path: str, name: str | None, split: str, option: str) -> Rows:
    """Load a split of a data set of the Hugging Face hub, or of a local folder in its form, through `datasets`.

    Raises:
        RecipeError: It cannot be had; the message says what `datasets` said and how to do without the hub.
    """
    import datasets

    try:
        return cast(Rows, datasets.load_dataset(path, name, split=split))
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        raise RecipeError(
            f"data set {path!r}, split {split!r} cannot be loaded: {first_line}. Without a network, give {option} "
            "a local folder or file"
        ) from error
