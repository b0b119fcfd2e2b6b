"""`rlkit diff RUN RUN`: where two runs differ: recipes, environments, the first step, the first tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.base.text import counted
from rlkit.cli.views.compare import RunComparison, compare
from rlkit.cli.views.display import echo, show
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
    folders = [word for word in argv if word != "--json"]
    if len(folders) != 2 or any(folder.startswith("-") for folder in folders):
        raise RecipeError("rlkit diff needs two run folders: rlkit diff runs/a runs/b")
    first, second = map(folder_of, folders)
    comparison = compare(first, second)
    if len(folders) < len(argv):
        print(json.dumps(comparison.as_json()))
    else:
        _report(comparison, folders)
    return 1 if comparison.differs else 0


def folder_of(name: str) -> Path:
    """Return a run folder.

    Raises:
        RecipeError: It is none.
    """
    folder = Path(name)
    if not os.path.isdir(folder) or home_of(name) != folder:
        raise RecipeError(f"{name!r} is no run folder, expected one with recipe.yaml")
    return folder


def _report(comparison: RunComparison, folders: Sequence[str]) -> None:
    for title, pairs in (("recipe", comparison.recipe), ("environment", comparison.environment)):
        if pairs:
            show((title, *folders), [(key, *map(_text, pair)) for key, pair in pairs.items()])
        else:
            echo(f"{title}: the same")
    for line in lines(comparison):
        echo(line)


def lines(comparison: RunComparison) -> Iterator[str]:
    """Yield what is said of the steps, the answers and the tensors of two runs."""
    if comparison.step is None:
        yield f"metrics: the same in the {counted(comparison.steps, 'step')} that both have"
    else:
        names = ", ".join(f"{name} {_text(a)} and {_text(b)}" for name, (a, b) in comparison.step.metrics.items())
        more = f", and {comparison.step.others} others" if comparison.step.others else ""
        yield f"metrics: the first step that differs is {comparison.step.number}: {names}{more}"
    if comparison.answer is None:
        yield "answers: the same in all rollouts that both have"
    else:
        answer = comparison.answer
        yield f"answers: the first that differs is in {answer.file}, row {answer.row}: {answer.what}"
    if comparison.tensor is not None:
        where = f"{comparison.tensor.name} in {comparison.tensor.checkpoint}"
        yield f"tensors: the first that differs is {where}: {comparison.tensor.what}"
    else:
        listed = ", ".join(comparison.checkpoints)
        yield (
            f"tensors: the same in {listed}" if listed else "weights: not compared, no checkpoint of this step was kept"
        )


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "-" if value is None else str(value)
