"""The validation before training of a run that is not at its end: its metrics, made again of its answers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from rlkit.records.rows import read_rows


@lru_cache(maxsize=32)
def metrics_of(files: Sequence[tuple[Path, object]]) -> dict[str, float]:
    """Return the metrics of a validation's answers, by the names that they have in `result.json`.

    Args:
        files: Of all ranks, each with what changes when it does.

    Raises:
        RecipeError: A file cannot be read, or a row in it is none.
    """
    from rlkit.records.validation_metrics import GradedCompletion, metrics

    answers = defaultdict(list)
    for path, _ in files:
        for row in read_rows(path):
            kind = row.group[0]
            answers["" if kind == "greedy" else f"{kind}_"].append(GradedCompletion.of(row.trajectory))
    metrics_by_kind = {
        prefix: metrics(sorted(rows, key=lambda answer: answer.prompt)) for prefix, rows in answers.items()
    }
    return {f"{prefix}{name}": value for prefix, rows in metrics_by_kind.items() for name, value in rows}
