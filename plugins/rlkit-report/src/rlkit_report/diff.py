"""`rlkit diff RUN RUN`: where two runs differ: recipes, environments, the first step, the first tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlkit.base.errors import RecipeError
from rlkit.base.terminal import echo, show
from rlkit.base.text import similar
from rlkit.records.folder import folder_of
from rlkit_report.comparison import RunComparison, compare, lines, value_text

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
    unknown = [word for word in folders if word.startswith("--")]
    if unknown:
        raise RecipeError(f"unknown option {unknown[0]!r}; {similar(unknown[0], ['--json'], 'expected')}")
    if len(folders) != 2 or any(folder.startswith("-") for folder in folders):
        raise RecipeError("rlkit diff needs two run folders: rlkit diff runs/a runs/b")
    first, second = map(folder_of, folders)
    comparison = compare(first, second)
    if len(folders) < len(argv):
        print(json.dumps(comparison.as_json()))
    else:
        _report(comparison, folders)
    return 1 if comparison.differs else 0


def _report(comparison: RunComparison, folders: Sequence[str]) -> None:
    for title, pairs in (("recipe", comparison.recipe), ("environment", comparison.environment)):
        if pairs:
            show((title, *folders), [(key, *map(value_text, pair)) for key, pair in pairs.items()])
        else:
            echo(f"{title}: the same")
    for line in lines(comparison):
        echo(line)
