"""Tasks in the form of Harbor: a folder each, with an instruction, files and tests."""

from __future__ import annotations

import io
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.base.errors import RecipeError, show
from rlkit.base.files import list_inside, read_inside
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt, Row

LARGEST_TASK = 2**20
"""Bytes of a task's files, all of which its rollouts carry."""
MAX_FILES = 10_000
SETTINGS = "task.toml"
WORKDIR = "/app"
WITHOUT_MEANING = {
    "": {"version", "schema_version", "source", "task", "metadata", "solution", "agent", "verifier", "environment"},
    "agent": {"timeout_sec"},
    "verifier": {"timeout_sec"},
    "environment": {
        *("build_timeout_sec", "cpus", "memory", "memory_mb", "storage", "storage_mb"),
        *("docker_image", "allow_internet", "network_mode", "workdir"),
    },
}
"""Settings of `task.toml` by section that are descriptions, the recipe's own limits, or read below."""
DEFAULTS = {"verifier.environment_mode": "shared", "environment.os": "linux"}
"""Settings whose value is what rlkit does."""
CONTAINERS = (
    "leave the task out, or play it in containers with the taskset `harbor` of verifiers (`VerifiersTask` of "
    "plugins/rlkit-env-verifiers)"
)


class Harbor(Task):
    """Folders in Harbor's task format, without containers: `instruction.md`, `environment/`, `tests/test.sh`.

    The prompt is the instruction. An agent starts with the files of `environment/` in its folder, which its sandbox
    shows at the task's working directory too, `/app` unless the task has another. `CommandReward` with the command
    `bash /tests/test.sh` and the number `/logs/verifier/reward.txt` scores what it leaves; no agent sees the tests.
    Time, memory and disk are limited by the agent and the reward. What a task needs besides is refused by name.

    Args:
        path: A task's folder, or a folder of such folders.
        validation_path: The validation tasks; null if there are none.
        ignore_image: Play tasks that have an image or a Dockerfile with the programs of this machine. Their commands do
            not run; only `WORKDIR` is read.
        ignore_network: Play tasks that may use the network without it.
    """

    def __init__(
        self,
        path: str,
        validation_path: str | None = None,
        *,
        ignore_image: bool = False,
        ignore_network: bool = False,
    ) -> None:
        self.path = path
        self.validation_path = validation_path
        self.ignore_image = ignore_image
        self.ignore_network = ignore_network

    def files(self) -> list[tuple[str, str]]:
        validation = [] if self.validation_path is None else [("validation_path", self.validation_path)]
        return [("path", self.path), *validation]

    def rows(self, split: Split) -> Sequence[Row]:
        path = self.path if split == "train" else self.validation_path
        if path is None:
            raise RecipeError(
                "the task has no validation rows: set task.validation_path, or switch validation off (validation: null)"
            )
        names = sorted(os.listdir(path)) if os.path.isdir(path) else []
        folders = [name for name in (".", *names) if os.path.lexists(os.path.join(path, name, SETTINGS))]
        if not folders:
            raise RecipeError(f"Harbor has path={path!r}, expected a folder with a task.toml, or with folders of such")
        return [self._row(Path(path), name) for name in folders]

    def prompt(self, row: Row, index: int) -> Prompt:
        messages = [{"role": "user", "content": row["instruction"]}]
        return Prompt(row["id"], messages, meta={name: row[name] for name in ("files", "tests", "workdir")})

    def _row(self, root: Path, name: str) -> Row:
        """Return a task, which may be a stranger's, as a row.

        Raises:
            RecipeError: It is incomplete, leads elsewhere, or needs what rlkit has not.
        """
        folder = root / name
        try:
            settings = tomllib.loads(_read(root, f"{name}/{SETTINGS}"))
            instruction = _read(root, f"{name}/instruction.md")
        except (OSError, ValueError, RecursionError) as error:
            raise RecipeError(f"the Harbor task {str(folder)!r} cannot be read: {error}") from error
        environment = settings.get("environment", {})
        self._check(folder, settings)
        files = _texts(root, f"{name}/environment")
        dockerfile = files.pop("Dockerfile", None)
        if "docker_image" in environment or dockerfile is not None:
            self._refuse_unless(
                self.ignore_image, folder, "has an image or a Dockerfile", "ignore_image: true plays it"
            )
        composed = [name for name in files if "compose" in name and name.endswith((".yml", ".yaml"))]
        if composed:
            raise RecipeError(f"the Harbor task {str(folder)!r} has several containers ({composed[0]}); {CONTAINERS}")
        tests = {f"/tests/{name}": text for name, text in _texts(root, f"{name}/tests").items()}
        if "/tests/test.sh" not in tests:
            raise RecipeError(f"the Harbor task {str(folder)!r} has no tests/test.sh, which writes its reward")
        if sum(len(text) for text in (*files.values(), *tests.values())) > LARGEST_TASK:
            raise RecipeError(f"the Harbor task {str(folder)!r} has over {LARGEST_TASK:,} characters in its files")
        directories = re.findall(r"(?im)^\s*WORKDIR\s+(\S+)", dockerfile or "")
        workdir = environment.get("workdir") or (directories[-1] if directories else WORKDIR)
        return {
            "id": folder.resolve().name,
            "instruction": instruction,
            "files": files,
            "tests": tests,
            "workdir": workdir,
        }

    def _check(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Check that a task needs nothing that only a container has."""
        for section, names in WITHOUT_MEANING.items():
            values = settings.get(section, {}) if section else settings
            if not isinstance(values, dict):
                raise RecipeError(f"the Harbor task {str(folder)!r} has {section}={show(values)}, expected a section")
            for name, value in values.items():
                key = f"{section}.{name}".lstrip(".")
                if name not in names and value and value != DEFAULTS.get(key):
                    raise RecipeError(f"the Harbor task {str(folder)!r} needs {key}={show(value)}; {CONTAINERS}")
        environment = settings.get("environment", {})
        offline = environment.get("network_mode", "no-network") == "no-network"
        if not offline or environment.get("allow_internet", "network_mode" not in environment):
            self._refuse_unless(
                self.ignore_network,
                folder,
                "may use the network, as Harbor's tasks may unless environment.allow_internet is false",
                "ignore_network: true plays it without",
            )

    def _refuse_unless(self, ignored: bool, folder: Path, need: str, remedy: str) -> None:
        if not ignored:
            raise RecipeError(f"the Harbor task {str(folder)!r} {need}; {remedy}, if that is enough; else {CONTAINERS}")


def _read(root: Path, name: str, max_bytes: int = LARGEST_TASK) -> str:
    return io.StringIO(read_inside(root, name, max_bytes).decode(), newline=None).read()


def _texts(root: Path, name: str) -> dict[str, str]:
    """Return the files in a folder by their relative paths; none where it is missing.

    Raises:
        RecipeError: One is no text, or leads elsewhere, or they are too many or too large.
    """
    texts: dict[str, str] = {}
    characters, path = 0, root / name
    try:
        for file in list_inside(root, name):
            path = root / file
            text = texts[Path(file).relative_to(name).as_posix()] = _read(root, file)
            characters += len(text)
            if len(texts) > MAX_FILES or characters > LARGEST_TASK:
                raise ValueError(f"with those before, over {MAX_FILES:,} files or {LARGEST_TASK:,} characters")
    except (OSError, ValueError) as error:
        raise RecipeError(f"Harbor cannot read {str(path)!r} as a text: {error}") from error
    return texts
