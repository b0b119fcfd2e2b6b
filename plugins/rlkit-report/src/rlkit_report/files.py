"""A run's folder, read as far as it is written: metrics, recipe, environment, result, and files of rollouts."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from pathlib import Path
from typing import NamedTuple

from rlkit.base.errors import RecipeError, explain
from rlkit.base.files import MAX_JSON_BYTES, open_inside, read_inside
from rlkit.recipe.credentials import without_credentials
from rlkit.records.lines import read_lines
from rlkit.types import JsonObject
from rlkit_report.headline import headline
from rlkit_report.saved_validation import metrics_of

NAME = re.compile(r"(step|validation)-(\w+?)(?:\.rank(\d+))?\.jsonl\.gz")
MAX_PROFILES, MAX_TEXT = 200, 65_536
"""Files of profiles that are listed, and bytes of a text that is shown."""

MOST_STEPS = 500
"""Steps whose rollouts are shown, unless their size is asked for: a browser opens 32,000 rows within seconds."""

NOT_PHASES = re.compile(r"_per_|_share$|^time/mfu$")
"""Metrics of `time/` that are no seconds of a phase."""


class RolloutFile(NamedTuple):
    """A file of rollouts: those of a step, or the answers of a validation, of one rank."""

    path: Path
    kind: str
    when: str
    rank: int

    @property
    def step(self) -> int | None:
        """The number of the step; None for the validations before and after training."""
        return int(self.when) if self.when.isdecimal() else None

    @property
    def order(self) -> tuple[float, str, int]:
        """What files are sorted by."""
        ends = {"before": 0.0, "after": float("inf")}
        return ends.get(self.when, self.step or 0), self.kind, self.rank


class Metrics(NamedTuple):
    """Metrics by name at steps in ascending order; None where a step has none, a text for one that is not finite."""

    steps: list[int]
    values: dict[str, list[float | str | None]]


@dataclass
class RunFiles:
    """Reads a run's folder.

    Args:
        path: The folder.
        max_bytes: How much of rollouts is read, as compressed; of more, those of every second step are, and so on.
        max_steps: Of how many steps rollouts are read.
        notes: What could not be read, and what was left out.
    """

    path: Path
    max_bytes: float
    max_steps: float = MOST_STEPS
    notes: list[str] = field(default_factory=list)

    def overview(self) -> JsonObject:
        """Return all but the rollouts, as JSON holds it."""
        result = self._json("result.json")
        steps, values = self.metrics(result)
        phases = [name for name in values if name.startswith("time/") and not NOT_PHASES.search(name)]
        environment = self._json("environment.json")
        recipe = self.recipe()
        about = {"name": str(self.path), "recipe": recipe, "environment": environment, "result": result}
        about["headline"] = headline(self.path, recipe, environment, result, values)
        metrics = {"steps": steps, "metrics": values, "phases": phases}
        return {**about, **metrics, "profile": self.profile(), "notes": self.notes}

    def state(self) -> dict[Path, tuple[int, ...]]:
        """Return the identity of a file's content: its number, size and time."""
        stamps = {path: _stamp(path) for path in self._sources()}
        return {path: stamp for path, stamp in stamps.items() if stamp}

    def _sources(self) -> Iterator[Path]:
        yield from (self.path / name for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "result.json"))
        yield from (self.path / "rollouts").glob("*.jsonl.gz")
        yield from (self.path / "profile").glob("*")

    def recipe(self) -> str:
        """Return the recipe's text, without credentials that an earlier version may have written."""
        try:
            text = read_inside(self.path, "recipe.yaml", MAX_JSON_BYTES).decode(errors="replace")
            return without_credentials(text)
        except OSError as error:
            self.notes.append(f"{self.path / 'recipe.yaml'} cannot be read: {explain(error)}")
            return ""

    def metrics(self, result: JsonObject) -> Metrics:
        """Return the metrics of `metrics.jsonl`, and those of the validations before and after training."""
        rows = {row["step"]: row for row in self._rows("metrics.jsonl") if type(row.get("step")) is int}
        validation, last = result.get("validation"), result.get("steps")
        for when, step in (("before", 0), ("after", last if type(last) is int else max(rows, default=0))):
            of_when = validation.get(when) if isinstance(validation, dict) else None
            if not isinstance(of_when, dict) and when == "before":
                of_when = self._validated_before()
            if isinstance(of_when, dict) and of_when:
                rows[step] = {f"validation/{name}": value for name, value in of_when.items()} | rows.get(step, {})
        steps = sorted(rows)
        names = sorted({name for row in rows.values() for name, value in row.items() if _is_number(value)} - {"step"})
        columns = {name: [rows[step].get(name) for step in steps] for name in names}
        values = {name: [x if _is_number(x) else None for x in column] for name, column in columns.items()}
        return Metrics(steps, values)

    def _validated_before(self) -> dict[str, float]:
        """Return the metrics of the validation before training as its answers have them, while there is no result."""
        paths = sorted((self.path / "rollouts").glob("validation-before*.jsonl.gz"))
        try:
            return metrics_of(tuple((path, _stamp(path)) for path in paths))
        except RecipeError as error:
            self.notes.append(f"no validation before training: {error}")
            return {}

    def profile(self) -> list[JsonObject]:
        """Return the files of `profile/` with their sizes, and the texts of those that are texts."""
        profiles: list[JsonObject] = []
        for path in sorted((self.path / "profile").glob("*"))[:MAX_PROFILES]:
            text = ""
            if path.suffix == ".txt":
                try:
                    with open_inside(path.parent, path.name) as file:
                        text = file.read(MAX_TEXT).decode("utf-8", "replace")
                except OSError as error:
                    self.notes.append(f"{path} cannot be read: {explain(error)}")
            profiles.append({"name": f"profile/{path.name}", "bytes": sum(_stamp(path)[2:]), "text": text})
        return profiles

    def rollouts(self) -> Iterator[tuple[RolloutFile, JsonObject, bytes]]:
        """Yield the rows of `rollouts/` in the order of steps, each with the file and the line that it is from."""
        for file in self._files():
            try:
                for number, line in read_lines(file.path):
                    row = _parsed(line)
                    if row is None:
                        self.notes.append(f"{file.path}, line {number} is no JSON object, and left out")
                    else:
                        yield file, row, line
            except RecipeError as error:
                self.notes.append(str(error))

    def _files(self) -> list[RolloutFile]:
        matches = ((path, NAME.fullmatch(path.name)) for path in (self.path / "rollouts").glob("*.jsonl.gz"))
        rollout_files = [RolloutFile(path, m[1], m[2], int(m[3] or 0)) for path, m in matches if m]
        rollout_files.sort(key=lambda file: file.order)
        steps = sorted({file.step for file in rollout_files if file.kind == "step" and file.step is not None})
        size = sum(sum(_stamp(file.path)[2:]) for file in rollout_files)
        stride = max(ceil(size / self.max_bytes), ceil(len(steps) / self.max_steps))
        if stride > 1:
            shown_steps = {*steps[::stride], *steps[-1:]}
            rollout_files = [file for file in rollout_files if file.kind != "step" or file.step in shown_steps]
            count = f"{len(shown_steps):,} of {len(steps):,} steps"
            self.notes.append(f"{self.path}: rollouts of {count}, for size; raise --max-mb for more")
        return rollout_files

    def _json(self, name: str) -> JsonObject:
        """Return a JSON file's object; an empty one where there is none yet."""
        path = self.path / name
        try:
            return _parsed(read_inside(self.path, name, MAX_JSON_BYTES)) or {}
        except FileNotFoundError:
            return {}
        except OSError as error:
            self.notes.append(f"{path} cannot be read: {explain(error)}")
            return {}

    def _rows(self, name: str) -> Iterator[JsonObject]:
        """Yield the objects of a file of JSON lines; a last line that is still being written is none."""
        path = self.path / name
        if not os.path.exists(path):
            return
        try:
            for row in (_parsed(line) for _, line in read_lines(path)):
                if row is not None:
                    yield row
        except RecipeError as error:
            self.notes.append(str(error))


def _stamp(path: Path) -> tuple[int, ...]:
    """Return a file's number, time and size; nothing where there is none."""
    try:
        status = path.stat()
    except OSError:  # it was replaced meanwhile, and reading it will tell
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_size


def _is_number(value: object) -> bool:
    """Whether a value is a number, or the text of one that is not finite."""
    if isinstance(value, str):
        return value in ("NaN", "Infinity", "-Infinity")
    return isinstance(value, int | float) and not isinstance(value, bool)


def _parsed(line: bytes) -> JsonObject | None:
    """Return the object of a line; None if it is none. Numbers that are not finite become texts."""
    try:
        row = json.loads(line, parse_constant=str)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def samples_of(row: JsonObject) -> list[JsonObject]:
    """Return a row, and the further samples of an agent's session in it."""
    branches = row.get("branches")
    return [row, *(branch for branch in branches if isinstance(branch, dict))] if isinstance(branches, list) else [row]


def token_ids(row: JsonObject) -> list[int]:
    """Return a row's token ids, those of all its samples; none where they are not whole numbers."""
    lists = (sample.get("tokens") for sample in samples_of(row))
    valid = (tokens for tokens in lists if isinstance(tokens, list) and {*map(type, tokens)} <= {int})
    return [token for tokens in valid for token in tokens]


def chosen(row: JsonObject) -> int | None:
    """Return the number of tokens that the policy sampled, in all samples; None where the row has no mask."""
    masks = [mask for mask in (sample.get("mask") for sample in samples_of(row)) if isinstance(mask, list) and mask]
    return sum(map(bool, chain.from_iterable(masks))) if masks else None
