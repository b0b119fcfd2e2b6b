"""The outcome of a run in Python: its metrics, its rollouts, its curves."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError
from rlkit.base.installed import extra_command
from rlkit.recipe.parsing.suggest import nearest
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOTTED = ("reward/mean", "validation/accuracy", "policy/loss", "rollout/length", "policy/entropy")
"""The metrics that `Result.plot` draws by default."""
MARKED = 50
"""Curves of fewer points have a mark at each."""


@dataclass(frozen=True)
class Result:
    """The outcome of a run.

    Args:
        status: `ok`, or `interrupted` by a signal.
        folder: The run folder.
        steps: The number of steps, those before a resume included.
        seconds: The duration of the run.
        validation: Metrics `before` and `after` training; None for a validation that did not run.
        metrics: The metrics of each step, as in `metrics.jsonl`.
        verdict: How validation accuracy has changed, as in `result.json`; None without two validations.
    """

    status: str
    folder: Path
    steps: int
    seconds: float
    validation: Mapping[str, Mapping[str, float] | None]
    metrics: list[dict[str, float]] = field(repr=False)
    verdict: Mapping[str, object] | None = None

    @property
    def model(self) -> Path | None:
        """The folder of the trained model or adapter; None if no step completed."""
        final = self.folder / "final"
        return final if os.path.isdir(final) else None

    def rollouts(self, step: int | None = None) -> Iterator[JsonObject]:
        """Yield the saved trajectories of a step, or of all steps in order, as the rows of `rollouts/`."""
        from rlkit.records.lines import json_rows

        name = "step-*" if step is None else f"step-{step:05d}*"
        for path in sorted((self.folder / "rollouts").glob(f"{name}.jsonl.gz")):
            yield from json_rows(path)

    def plot(self, *names: str) -> Figure:
        """Return a figure with a chart of each metric over the steps, validation before and after included.

        Args:
            names: Metrics; by default reward, validation accuracy, loss, length and entropy, if the run has them.

        Raises:
            RecipeError: matplotlib is not installed, or the run has no metric of a name.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise RecipeError(f"Result.plot needs matplotlib: {extra_command('plot')}") from error
        curves = self._curves()
        for name in names:
            if name not in curves:
                raise RecipeError(f"the run has no metric {name!r}; {nearest(name, list(curves))}")
        chosen = names or [name for name in PLOTTED if name in curves]
        charts = Figure(figsize=(4.5 * max(len(chosen), 1), 3), layout="constrained")
        for number, name in enumerate(chosen, 1):
            axes = charts.add_subplot(1, len(chosen), number)
            axes.plot(*zip(*curves[name], strict=True), marker="." if len(curves[name]) < MARKED else None)
            axes.set(title=name, xlabel="step")
        return charts

    def _curves(self) -> dict[str, list[tuple[int, float]]]:
        """Return the steps and values of each metric."""
        rows = [(int(row["step"]), row) for row in self.metrics]
        for step, when in ((0, "before"), (self.steps, "after")):
            metrics = self.validation.get(when) or {}
            rows.append((step, {f"validation/{name}": value for name, value in metrics.items()}))
        curves: dict[str, dict[int, float]] = {}
        for step, row in rows:
            for name, value in row.items():
                curves.setdefault(name, {})[step] = value
        return {name: sorted(values.items()) for name, values in curves.items()}

    def columns(self) -> dict[str, list[float | None]]:
        """Return the metrics by name, None if a step lacks one: `pandas.DataFrame(result.columns())`."""
        names = dict.fromkeys(name for row in self.metrics for name in row)
        return {name: [row.get(name) for row in self.metrics] for name in names}
