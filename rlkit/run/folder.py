"""The run folder: all files that a run writes."""

from __future__ import annotations

import gzip
import json
import os
import platform
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from io import BytesIO
from pathlib import Path

from rlkit.errors import RecipeError
from rlkit.installed import DISTRIBUTION
from rlkit.registry import Registry
from rlkit.run.rows import as_row
from rlkit.text import redact_arguments
from rlkit.types import Trajectory

RESERVED, RESERVED_BYTES = "reserved", 16 * 2**10
"""A file that holds the space of `result.json` and of the last metrics until the run ends."""
PACKAGES = (DISTRIBUTION, "torch", "lightning", "transformers", "peft", "datasets", "jsonargparse", "pluggy")


def default_folder(recipe_name: str) -> Path:
    """Return an unused folder name: `runs/<recipe>-<time>`."""
    name = f"{recipe_name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = Path("runs") / name, 1
    while os.path.exists(folder):
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


class RunFolder:
    """Writes `recipe.yaml`, `environment.json`, `rollouts/` and `result.json`.

    Args:
        path: A folder that does not exist yet, holds no step of a run, or holds the run that is resumed.
        recipe_yaml: The recipe, every option filled in.
        rank: Each rank writes its own rollouts; rank 0 writes everything else.
    """

    def __init__(self, path: Path, recipe_yaml: str, rank: int = 0) -> None:
        self.path = path
        self.recipe_yaml = recipe_yaml
        self.rank = rank

    def create(self, registry: Registry, resumed: bool = False) -> None:
        """Create the folder, without what a start that made no step has left, and write what describes the run.

        Raises:
            RecipeError: It holds another run than the one that is resumed, or cannot be written.
        """
        if not resumed and self._has_steps():
            raise RecipeError(
                f"--out is {str(self.path)!r}, which holds another run; choose a new folder, or go on with "
                "--resume auto"
            )
        try:
            make_private(self.path)
            (self.path / "rollouts").mkdir(exist_ok=True)
            if not resumed:
                for path in (self.path / "result.json", *self.path.glob("rollouts/validation-*")):
                    if os.path.isfile(path):
                        path.unlink()
            write_whole(self.path / "recipe.yaml", self.recipe_yaml.encode())
            run_id = (self.run_id() if resumed else None) or uuid.uuid4().hex[:12]
            self._write("environment.json", environment(registry) | {"run_id": run_id})
            (self.path / RESERVED).write_bytes(os.urandom(RESERVED_BYTES))  # no file system can compress these
        except OSError as error:
            raise RecipeError(f"--out is {str(self.path)!r}, which cannot be written: {error}") from error

    def _has_steps(self) -> bool:
        """Return whether a run has made a step here, by any of the files that tell."""
        metrics, result = self.path / "metrics.jsonl", self.path / "result.json"
        if any(self.path.glob("rollouts/step-*")) or (os.path.exists(metrics) and metrics.stat().st_size):
            return True
        try:
            return bool(json.loads(result.read_text(encoding="utf-8"))["steps"])
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError):
            return True

    def run_id(self) -> str | None:
        """Return the run's own name for loggers, which stays when it is resumed; None before `create`."""
        try:
            known = json.loads((self.path / "environment.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return str(known["run_id"]) if "run_id" in known else None

    def dump(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Write trajectories to `rollouts/<name>.jsonl.gz`, or `<name>.rank<r>.jsonl.gz` on a rank other than 0."""
        write_whole(Path(f"{self.rollouts(name)}.jsonl.gz"), json_lines(map(as_row, trajectories)))

    def rollouts(self, name: str) -> Path:
        """Return the path of this rank's files of that name, without what each of them ends in."""
        return self.path / "rollouts" / of_rank(name, self.rank)

    def result(self, result: dict[str, object]) -> None:
        """Write how the run ended, on a full disk too: the space that `create` reserved is released first."""
        (self.path / RESERVED).unlink(missing_ok=True)
        self._write("result.json", result)

    def _write(self, name: str, content: dict[str, object]) -> None:
        write_whole(self.path / name, json_text(content))


def output_path(path: str) -> Path:
    """Return the path that `--out` names; `~` is the user's home.

    Raises:
        RecipeError: It is empty, or no path.
    """
    if not path.strip() or "\0" in path:
        raise RecipeError(f"--out is {path!r}, expected the path of a folder")
    return Path(os.path.expanduser(path))


def make_private(folder: Path) -> None:
    """Make a folder readable to its owner alone, since prompts and answers may be confidential.

    One that holds something stays as it is, and so does one of another user.

    Raises:
        OSError: It cannot be made or read.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        with suppress(PermissionError):
            folder.chmod(0o700)


def new_folder(path: str) -> Path:
    """Create a folder for `--out`, readable to its owner alone.

    Raises:
        RecipeError: It holds something, or cannot be written.
    """
    folder = output_path(path)
    try:
        make_private(folder)
        used = any(folder.iterdir())
    except OSError as error:
        raise RecipeError(f"--out is {path!r}, which cannot be written: {error}") from error
    if used:
        raise RecipeError(f"--out is {path!r}, which holds something; choose a new folder")
    return folder


def of_rank(name: str, rank: int) -> str:
    """Return the name of a rank's own file: that of rank 0 is the name itself."""
    return f"{name}.rank{rank}" if rank else name


def json_text(content: object) -> bytes:
    """Return a JSON file's content."""
    return (json.dumps(content, indent=2) + "\n").encode()


_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode


def json_lines(rows: Iterable[Mapping[str, object]]) -> bytes:
    """Return the content of a compressed file of JSON lines."""
    buffer = BytesIO()
    with gzip.GzipFile(fileobj=buffer, mode="wb", compresslevel=5) as file:
        for row in rows:
            line = _encode(row) + "\n"
            file.write(line.encode("utf-8", "backslashreplace"))  # half of a surrogate pair is escaped as in JSON
    return buffer.getvalue()


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all.

    Raises:
        OSError: It cannot be written; what was there before stays.
    """
    beside = path.with_name(f"{path.name}.partial")
    try:
        beside.write_bytes(content)
        beside.rename(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def first_groups(trajectories: Sequence[Trajectory], limit: int | None) -> Sequence[Trajectory]:
    """Return the groups with the smallest numbers whose trajectories fit the limit, at least one group."""
    if limit is None or len(trajectories) <= limit:
        return trajectories
    groups: dict[int, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.group].append(trajectory)
    kept: list[Trajectory] = []
    for number in sorted(groups):
        if kept and len(kept) + len(groups[number]) > limit:
            break
        kept += groups[number]
    return kept


def environment(registry: Registry) -> dict[str, object]:
    """Return what the run depends on besides its recipe."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "plugins": [{"name": p.name, "distribution": p.distribution, "version": p.version} for p in registry.plugins],
        "command": redact_arguments(sys.argv),
        "git_sha": _git_sha(),
    }


def _git_sha() -> str | None:
    try:
        done = subprocess.run(("git", "rev-parse", "HEAD"), capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
