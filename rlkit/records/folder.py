"""The layout of a run folder, and its files written and read."""

from __future__ import annotations

import gzip
import json
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from io import BytesIO
from itertools import count
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import MANIFEST, check_run_folder, nearby
from rlkit.recipe.yaml_text import load_yaml
from rlkit.types import JsonObject

AVERAGE = "ema"
"""The folder of the averaged weights, which are not validated."""
ROLLOUT_FILE = re.compile(r"(?:step|validation)-([0-9]+|after)(?:\.rank[0-9]+)?\.(?:jsonl\.gz|parquet)")
"""A file of a step or a validation, except of the validation before training."""
COMPRESSION = 7
"""Of gzip: 9 makes the rows of long answers 0.3% smaller, and takes twice as long."""


def default_folder(recipe_name: str) -> Path:
    """Return an unused folder name: `runs/<recipe>-<time>`."""
    name = f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (Path("runs") / (f"{name}-{number}" if number else name) for number in count())
    return next(folder for folder in folders if not os.path.exists(folder))


def output_path(path: str) -> Path:
    """Return the path that `--out` names; `~` is the user's home.

    Raises:
        RecipeError: The path is empty or invalid.
    """
    if not path.strip() or "\0" in path:
        raise RecipeError(f"--out is {path!r}, expected the path of a folder")
    return Path(os.path.expanduser(path))


def make_private(folder: Path) -> None:
    """Create a folder that only its owner can read, since prompts and completions may be confidential.

    A folder that is not empty, or belongs to another user, keeps its mode.

    Raises:
        OSError: The folder cannot be created or read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        with suppress(PermissionError):
            folder.chmod(0o700)


def of_rank(name: str, rank: int) -> str:
    """Return the name of a rank's own file; rank 0 uses the name itself."""
    return f"{name}.rank{rank}" if rank else name


def json_text(content: object) -> bytes:
    """Return the content of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=str).encode


def json_lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Return the content of a compressed file of JSON lines."""
    buffer = BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=COMPRESSION) as file:
        for row in rows:
            line = _encode(row) + "\n"
            file.write(line.encode("utf-8", "backslashreplace"))  # half of a surrogate pair is escaped as in JSON
    return buffer.getvalue()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: The file cannot be written; an earlier version of it stays.
    """
    partial = path.with_name(f"{path.name}.partial")
    try:
        partial.write_bytes(content)
        partial.rename(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def flat(section: object, prefix: str = "") -> dict[str, object]:
    """Return the values of a recipe by dotted keys, without those that are null."""
    if not isinstance(section, dict):
        return {} if section is None else {prefix: section}
    return {k: v for name, part in section.items() for k, v in flat(part, f"{prefix}.{name}".lstrip(".")).items()}


def as_data(recipe_yaml: str) -> JsonObject:
    """Return a recipe as plain JSON data, without YAML's aliases.

    Raises:
        ValueError: Its aliases expand to too much.
        YAMLError: It is not YAML.
    """
    content: JsonObject = json.loads(_as_json(recipe_yaml), parse_constant=str)
    return content


@lru_cache(maxsize=2)
def _as_json(recipe_yaml: str) -> str:
    """Return a recipe as JSON; PyYAML takes 40 ms, and a run asks three times."""
    return json.dumps(load_yaml(recipe_yaml), default=str)


def home_of(location: str) -> Path | None:
    """Return the run folder that a location to resume from is, or is in; None if there is no such folder.

    Raises:
        RecipeError: The folder leads elsewhere.
    """
    for folder in (Path(location), *Path(location).parents[:2]):
        is_checkpoint = os.path.exists(folder / MANIFEST)  # not a run folder, even if it holds a recipe
        if os.path.isfile(folder / "recipe.yaml") and not is_checkpoint:
            check_run_folder(folder)
            return folder
    return None


def folder_of(name: str) -> Path:
    """Return a run folder.

    Raises:
        RecipeError: It is none.
    """
    folder = Path(name)
    if not os.path.isdir(folder) or home_of(name) != folder:
        hint = "expected one with recipe.yaml" if os.path.exists(folder) else nearby(folder)
        raise RecipeError(f"{name!r} is no run folder; {hint}")
    return folder
