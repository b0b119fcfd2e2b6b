"""Figures of a step: gathered from micro-batches and ranks, written to the run folder and to loggers."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlkit.errors import RecipeError
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

    def result(self) -> dict[str, float]:
        """Give all figures over all ranks; every rank must call this."""
        gathered: list[Any] = [(dict(self._sums), self._maxima)]
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            gathered = gathered * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(gathered, (dict(self._sums), self._maxima))
        total = Meter()
        for sums, maxima in gathered:
            for name, (value, weight) in sums.items():
                total._sums[name][0] += value
                total._sums[name][1] += weight
            for name, value in maxima.items():
                total.max(name, value)
        figures = {name: value / weight if weight else value for name, (value, weight) in total._sums.items()}
        return dict(sorted((figures | total._maxima).items()))


def memory_mb() -> float:
    """Give the resident memory of this process in MiB; 0 where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0.0
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def loggers(log: Log, folder: Path) -> list[Any]:
    """Make the loggers that the recipe asks for.

    Raises:
        RecipeError: A logger's package is not installed.
    """
    if log.wandb is None:
        return []
    try:
        from lightning.pytorch.loggers import WandbLogger

        wandb = WandbLogger(
            name=log.wandb.name or folder.name, project=log.wandb.project, offline=log.wandb.offline, save_dir=folder
        )
        wandb.experiment  # noqa: B018 (opens the run now, where a failure costs nothing)
    except ModuleNotFoundError as error:
        raise RecipeError("log.wandb needs the package wandb: pip install 'rlkit[wandb]'") from error
    return [wandb]


class MetricsLog:
    """Appends a JSON object a step to `metrics.jsonl`, and hands the same figures to loggers."""

    def __init__(self, path: Path, loggers: list[Any]) -> None:
        self._file = path.open("w", encoding="utf-8")
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
