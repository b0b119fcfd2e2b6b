"""`rlkit diff RUN RUN`: where two runs differ: recipes, environments, the first step, the first tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.cli.diff.compare import Comparison, compare
from rlkit.cli.display import echo, show
from rlkit.errors import RecipeError
from rlkit.run.launch import home_of

USAGE = """usage: rlkit diff RUN RUN [--json]
    shows where two runs differ: their recipes, their environments, the first step whose metrics differ, the first
    answer that differs, and the first tensor of the checkpoints that both have; a run in progress may be one of them
    exit status: 0 if nothing differs but times and the environment, 1 if something does
"""


def run(argv: Sequence[str]) -> int:
    """Compare two runs; return the exit status: 1 if they differ."""
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE, end="")
        return 0 if argv else 2
    places = [word for word in argv if word != "--json"]
    if len(places) != 2 or any(place.startswith("-") for place in places):
        raise RecipeError("rlkit diff needs two run folders: rlkit diff runs/a runs/b")
    first, second = map(folder_of, places)
    found = compare(first, second)
    if len(places) < len(argv):
        print(json.dumps(found.as_json()))
    else:
        _report(found, places)
    return 1 if found.differs else 0


def folder_of(place: str) -> Path:
    """Return a run folder.

    Raises:
        RecipeError: It is none.
    """
    folder = Path(place)
    if not os.path.isdir(folder) or home_of(place) != folder:
        raise RecipeError(f"{place!r} is no run folder, expected one with recipe.yaml")
    return folder


def _report(found: Comparison, places: Sequence[str]) -> None:
    for title, pairs in (("recipe", found.recipe), ("environment", found.environment)):
        if pairs:
            show((title, *places), [(key, *map(_text, pair)) for key, pair in pairs.items()])
        else:
            echo(f"{title}: the same")
    for line in lines(found):
        echo(line)


def lines(found: Comparison) -> Iterator[str]:
    """Yield what is said of the steps, the answers and the tensors of two runs."""
    if found.step is None:
        yield f"metrics: the same in the {found.steps} steps that both have"
    else:
        names = ", ".join(f"{name} {_text(a)} and {_text(b)}" for name, (a, b) in found.step.metrics.items())
        others = f", and {found.step.others} others" if found.step.others else ""
        yield f"metrics: the first step that differs is {found.step.number}: {names}{others}"
    if found.answer is None:
        yield "answers: the same in all rollouts that both have"
    else:
        yield f"answers: the first that differs is in {found.answer.file}, row {found.answer.row}: {found.answer.what}"
    if found.tensor is not None:
        where = f"{found.tensor.name} in {found.tensor.checkpoint}"
        yield f"tensors: the first that differs is {where}: {found.tensor.what}"
    else:
        listed = ", ".join(found.checkpoints)
        yield f"tensors: the same in {listed}" if listed else "tensors: the runs have no checkpoint in common"


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
