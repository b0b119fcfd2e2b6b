"""Models in pools of their own: what a run's ranks ask of them, and who starts the pools."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.distributed.ranks import Ranks
    from rlkit.recipe import Recipe
    from rlkit.types import RolloutBatch

Sums = dict[str, list[float]]
"""Sums of weighted values and of their weights, by the names of metrics."""


@dataclass
class PoolReply:
    """The outcome of a pool's work.

    Args:
        tensors: By name; those of rows in the order of the request.
        sums: Metrics.
    """

    tensors: dict[str, Tensor] = field(default_factory=dict)
    sums: Sums = field(default_factory=dict)


class PlacedModel(ABC):
    """A model in a pool. All ranks must ask the same of it, in the same order, each for rows of its own."""

    rate: float = 0.0
    """The learning rate of the next update."""

    @abstractmethod
    def ask(self, work: str, batch: RolloutBatch | None = None, **options: object) -> Callable[[], PoolReply]:
        """Begin some work: `values`, `logps`, `top`, `update`, `state` or `load`; return what waits for its end.

        Args:
            work: The method's name.
            batch: This rank's rows.
            options: Its other arguments, as JSON data.

        Raises:
            PoolError: By the returned function: the pool failed, died, or took longer than `train.deadline`.
        """


class Pools(ABC):
    """The pools of a recipe's `placement:`; all ranks must create this object.

    Args:
        recipe: Checked.
        ranks: This rank among the others; the first one starts the processes.
        folder: The run folder, with the recipe.

    Raises:
        RecipeError: A model cannot be placed.
    """

    @abstractmethod
    def __init__(self, recipe: Recipe, ranks: Ranks, folder: Path) -> None: ...

    @staticmethod
    @abstractmethod
    def problems(recipe: Recipe) -> Iterator[str]:
        """Yield what is wrong with `placement:`, before anything is loaded."""

    @abstractmethod
    def model(self, role: str, path: str | None = None) -> PlacedModel | None:
        """Return the model of a role, and a path where the role has several; None if it is not placed."""

    @abstractmethod
    def classifier(self, path: str, dtype: str) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        """Load a reward model; return the function from its inputs to outputs [B]; None if `reward` is not placed."""

    @abstractmethod
    def failure(self) -> str | None:
        """Name a process that has died, with its pool, roles, log and exit status; returns at once."""

    @abstractmethod
    def idle(self) -> dict[str, float]:
        """Return the share of time since the last call in which each pool did nothing, by pool.

        Raises:
            PoolError: A process was lost, so that the step lacks samples.
        """

    @abstractmethod
    def close(self) -> None:
        """End the processes."""
