"""The role of a policy loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from rlkit.ops.aggregate import Aggregation
from rlkit.types import Batch, LossOutput, PolicyOutput


class PolicyLoss(ABC):
    """Gives a loss for every token; it never divides: the loop weighs tokens by global counts.

    `aggregation` is the mode of `rlkit.ops.aggregate.weights` that the loss was published with; a recipe's
    `train.aggregation` overrides it.
    """

    aggregation: ClassVar[Aggregation] = "token_mean"

    @abstractmethod
    def __call__(self, out: PolicyOutput, batch: Batch) -> LossOutput:
        """Compare `out.logps` with `batch.old_logps` under `batch.advantages`; all [B,T] f32."""
