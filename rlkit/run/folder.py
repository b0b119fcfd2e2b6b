"""The run folder: all files that a run writes."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.files import MAX_JSON_BYTES, read_inside, unwritable
from rlkit.interfaces.content import pictures_of
from rlkit.records.environment import environment
from rlkit.records.folder import ROLLOUT_FILE, json_lines, json_text, make_private, of_rank, write_atomically
from rlkit.records.rows import as_row, picture_file
from rlkit.registry import Registry
from rlkit.types import Trajectory

RESERVED = "reserved"
"""A file that reserves disk space for `result.json` and the last metrics until the run ends."""
RESERVED_BYTES = 16 * 2**10


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
            raise RecipeError(f"--out is {str(self.path)!r}, which cannot be written: {unwritable(error)}") from error

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

    def dump(self, name: str, trajectories: Sequence[Trajectory], exact: bool = True) -> None:
        """Write trajectories to `rollouts/<name>.jsonl.gz`, or `<name>.rank<r>.jsonl.gz` on a rank other than 0."""
        self._write_pictures(trajectories)
        write_atomically(Path(f"{self.rollouts(name)}.jsonl.gz"), json_lines(as_row(t, exact) for t in trajectories))

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
