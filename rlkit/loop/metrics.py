"""Figures of a step: gathered from micro-batches and ranks, written to the run folder and to loggers."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from torch import Tensor

from rlkit.errors import RecipeError
from rlkit.loop.folder import RunFolder
from rlkit.models.ranks import Ranks
from rlkit.sections import Log


class Meter:
    """Collects weighted means, sums and maxima of a step over micro-batches and ranks."""

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._maxima: dict[str, float] = {}

    def mean(self, name: str, value: float | Tensor, weight: float = 1.0) -> None:
        """Add a value to a mean, in which it counts `weight` times."""
        if weight > 0:
            self._sums[name][0] += float(value) * weight
            self._sums[name][1] += weight

    def means(self, name: str, values: list[float]) -> None:
        """Add values to a mean."""
        for value in values:
            self.mean(name, value)

    def count(self, name: str, value: float) -> None:
        """Add to a sum."""
        self._sums[name][0] += value

    def max(self, name: str, value: float | Tensor) -> None:
        """Take part in a maximum."""
        self._maxima[name] = max(float(value), self._maxima.get(name, float("-inf")))

    def result(self, ranks: Ranks) -> dict[str, float]:
        """Give all figures over all ranks; every rank must call this."""
        total = Meter()
        for sums, maxima in ranks.objects((dict(self._sums), self._maxima)):
            for name, (value, weight) in sums.items():
                total._sums[name][0] += value
                total._sums[name][1] += weight
            for name, value in maxima.items():
                total.max(name, value)
        figures = {name: value / weight if weight else value for name, (value, weight) in total._sums.items()}
        return dict(sorted((figures | total._maxima).items()))


def loggers(log: Log, folder: RunFolder) -> list[Any]:
    """Make the loggers that the recipe asks for.

    Raises:
        RecipeError: A logger's package is not installed.
    """
    if log.wandb is None:
        return []
    try:
        from lightning.pytorch.loggers import WandbLogger

        wandb = WandbLogger(
            name=log.wandb.name or folder.path.name,
            project=log.wandb.project,
            offline=log.wandb.offline,
            save_dir=folder.path,
            id=folder.run_id(),
            resume="allow",
        )
        wandb.experiment  # noqa: B018 (opens the run now, where a failure costs nothing)
    except ModuleNotFoundError as error:
        raise RecipeError("log.wandb needs the package wandb: pip install 'rlkit-fabric[wandb]'") from error
    return [wandb]


class MetricsLog:
    """Appends a JSON object a step to `metrics.jsonl`, and hands the same figures to loggers.

    Args:
        path: The file.
        loggers: From `loggers`.
        done: Steps of it that stay; a resumed run makes the others again.
    """

    def __init__(self, path: Path, loggers: list[Any], done: int = 0) -> None:
        lines = path.read_text(encoding="utf-8").splitlines()[:done] if path.exists() else []
        beside = path.with_suffix(".partial")
        beside.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        beside.rename(path)
        self._file = path.open("a", encoding="utf-8")
        self._loggers = loggers

    def write(self, step: int, figures: dict[str, float]) -> None:
        """Write a step's figures."""
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()
        for logger in self._loggers:
            logger.log_metrics(figures, step)

    def close(self, status: str) -> None:
        """End the file and the loggers."""
        self._file.close()
        for logger in self._loggers:
            logger.finalize("success" if status == "ok" else status)
