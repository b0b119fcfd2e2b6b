"""The run folder: all files that a run writes."""

from __future__ import annotations

import gzip
import json
import os
import platform
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from importlib import metadata
from io import BytesIO
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import MAX_JSON_BYTES, read_inside
from rlkit.base.installed import DISTRIBUTION
from rlkit.base.text import redact_arguments
from rlkit.interfaces.content import pictures_of
from rlkit.recipe.yaml_text import load_yaml
from rlkit.registry import Registry
from rlkit.run.rows import as_row, picture_file
from rlkit.types import JsonObject, Trajectory

AVERAGE = "ema"
"""The folder of the averaged weights, which are not validated."""
RESERVED = "reserved"
"""A file that reserves disk space for `result.json` and the last metrics until the run ends."""
RESERVED_BYTES = 16 * 2**10
ROLLOUT_FILE = re.compile(r"(?:step|validation)-([0-9]+|after)(?:\.rank[0-9]+)?\.(?:jsonl\.gz|parquet)")
"""A file of a step or a validation, except of the validation before training."""
COMPRESSION = 7
"""Of gzip: 9 makes the rows of long answers 0.3% smaller, and takes twice as long."""
PACKAGES = (DISTRIBUTION, "torch", "lightning", "transformers", "peft", "datasets", "jsonargparse", "pluggy")


def default_folder(recipe_name: str) -> Path:
    """Return an unused folder name: `runs/<recipe>-<time>`."""
    name = f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path("runs") / name
    number = 1
    while os.path.exists(folder):
        folder = Path("runs") / f"{name}-{number}"
        number += 1
    return folder


class RunFolder:
    """Writes `recipe.yaml`, `environment.json`, `rollouts/` and `result.json`.

    Args:
        path: Path of the folder: new, without a step of a run, or that of the run to resume.
        recipe_yaml: Text of the recipe, with every option filled in.
        rank: This process's rank. Each rank writes its own rollouts; rank 0 writes everything else.
    """

    def __init__(self, path: Path, recipe_yaml: str, rank: int = 0) -> None:
        self.path = path
        self.recipe_yaml = recipe_yaml
        self.rank = rank

    def create(self, registry: Registry, resumed: bool = False, devices: str = "") -> None:
        """Create the folder and write the files that describe the run; the result of an earlier end is removed.

        Args:
            registry: The plugins of the run.
            resumed: Whether the run continues: files of its validations stay, those of a start without steps do not.
            devices: What it runs on, in words.

        Raises:
            RecipeError: The folder holds another run, or cannot be written.
        """
        if not resumed and self.has_steps():
            raise RecipeError(
                f"--out is {str(self.path)!r}, which holds another run; choose a new folder, or continue it with "
                "--resume auto"
            )
        try:
            make_private(self.path)
            (self.path / "rollouts").mkdir(exist_ok=True)
            earlier_validations = () if resumed else self.path.glob("rollouts/validation-*")
            for path in (self.path / "result.json", *earlier_validations):
                if os.path.isfile(path):
                    path.unlink()
            write_atomically(self.path / "recipe.yaml", self.recipe_yaml.encode())
            run_id = (self.run_id() if resumed else None) or uuid.uuid4().hex[:12]
            self._write("environment.json", environment(registry) | {"devices": devices, "run_id": run_id})
            (self.path / RESERVED).write_bytes(os.urandom(RESERVED_BYTES))  # no file system can compress these
        except OSError as error:
            raise RecipeError(f"--out is {str(self.path)!r}, which cannot be written: {error}") from error

    def has_steps(self) -> bool:
        """Check whether any file shows that a run has made a step here."""
        metrics = self.path / "metrics.jsonl"
        if any(self.path.glob("rollouts/step-*")) or (os.path.exists(metrics) and metrics.stat().st_size):
            return True
        try:
            return bool(json.loads(read_inside(self.path, "result.json", MAX_JSON_BYTES))["steps"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def run_id(self) -> str | None:
        """Return the run's id for loggers, which is kept on resume; None before `create`."""
        try:
            content = json.loads(read_inside(self.path, "environment.json", MAX_JSON_BYTES))
        except (OSError, ValueError):
            return None
        return str(content["run_id"]) if "run_id" in content else None

    def dump(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Write trajectories to `rollouts/<name>.jsonl.gz`, or `<name>.rank<r>.jsonl.gz` on a rank other than 0."""
        self._write_pictures(trajectories)
        write_atomically(Path(f"{self.rollouts(name)}.jsonl.gz"), json_lines(map(as_row, trajectories)))

    def remove_rollouts_after(self, step: int) -> None:
        """Remove the rollouts of later steps and validations, those of all ranks.

        Raises:
            OSError: A file cannot be removed.
        """
        for path in (self.path / "rollouts").iterdir():
            name = ROLLOUT_FILE.fullmatch(path.name)
            if name is not None and (name[1] == "after" or int(name[1]) > step):
                path.unlink()

    def _write_pictures(self, trajectories: Sequence[Trajectory]) -> None:
        """Write the pictures of trajectories to `rollouts/media/`, each once under its digest."""
        samples = (sample for trajectory in trajectories for sample in trajectory.samples)
        with_pictures = (sample for sample in samples if sample.media is not None)
        for picture in {picture for sample in with_pictures for picture in pictures_of(sample.messages)}:
            path = self.path / "rollouts" / picture_file(picture)
            if not os.path.isfile(path):
                path.parent.mkdir(exist_ok=True)
                write_atomically(path, picture.data)

    def rollouts(self, name: str) -> Path:
        """Return the path of this rank's files of that name, without their suffixes."""
        return self.path / "rollouts" / of_rank(name, self.rank)

    def result(self, result: dict[str, object]) -> None:
        """Write the outcome, even on a full disk: the space that `create` reserved is released first."""
        (self.path / RESERVED).unlink(missing_ok=True)
        self._write("result.json", result)

    def _write(self, name: str, content: dict[str, object]) -> None:
        write_atomically(self.path / name, json_text(content))


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


def new_folder(path: str) -> Path:
    """Create a folder for `--out` that only its owner can read.

    Raises:
        RecipeError: The folder is not empty, or cannot be written.
    """
    folder = output_path(path)
    try:
        make_private(folder)
        used = any(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"--out is {path!r}, which cannot be written: {error}") from error
    if used:
        raise RecipeError(f"--out is {path!r}, which is not empty; choose a new folder")
    return folder


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


def environment(registry: Registry) -> dict[str, object]:
    """Return the versions and the command that a run depends on besides its recipe."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": dict(_versions()),
        "plugins": [{"name": p.name, "distribution": p.distribution, "version": p.version} for p in registry.plugins],
        "command": redact_arguments(sys.argv),
        "git_sha": _git_sha(),
    }


@cache
def _versions() -> tuple[tuple[str, str], ...]:
    return tuple((name, metadata.version(name)) for name in PACKAGES)


def _git_sha() -> str | None:
    try:
        process = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return process.stdout.strip() or None


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
