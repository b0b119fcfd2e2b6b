"""The interfaces of optimizers and of learning-rate schedules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class WeightKind(StrEnum):
    """The kind of a weight.

    MATRIX is a matrix in a transformer block; EMBEDDING an embedding, an output head or any other matrix; VECTOR a bias
    or the scale of a norm.
    """

    MATRIX = "matrix"
    EMBEDDING = "embedding"
    VECTOR = "vector"


class WeightGroup(NamedTuple):
    """Weights of one kind whose shards are on the same ranks, so that they can be updated together.

    Args:
        kind: Kind of all the weights.
        weights: Trainable tensors, in the order of the model.
        weight_decay: The recipe's; 0 for vectors.
    """

    kind: WeightKind
    weights: list[Tensor]
    weight_decay: float

    def options(self) -> dict[str, object]:
        """Return the group as torch's optimizers take it."""
        return {"params": self.weights, "weight_decay": self.weight_decay}


class Optimizer(ABC):
    """Makes the optimizer of the policy or of the critic. The constructor takes the algorithm's own options.

    The learning rate, the weight decay and the clipping of gradients are the loop's: `train.lr`, `train.weight_decay`
    and `train.max_grad_norm`. Before each step the loop sets `lr` in every parameter group. A checkpoint holds the
    state of each weight, so its values must be tensors.
    """

    formula: ClassVar[str] = ""
    """What `explain` prints after the class's name, with the constructor's options by name."""

    takes_shards: bool = True
    """Whether it can update weights that FSDP2 has sharded, which are torch's DTensors."""

    trains_bfloat16: bool = False
    """Whether weights in bfloat16 follow updates that are smaller than their precision, as with stochastic rounding."""

    @abstractmethod
    def make(self, groups: Sequence[WeightGroup], lr: float) -> torch.optim.Optimizer:
        """Return an optimizer of all weights of the groups."""

    def explain(self) -> str:
        """Return the class's name and its options in force."""
        return f"{type(self).__name__} {self.formula.format(**vars(self))}".rstrip()


class Schedule(ABC):
    """The course of the learning rate after the warm-up.

    It has no state: a resumed run takes the rate from the number of the step.
    """

    formula: ClassVar[str] = ""
    """What `explain` prints after the class's name, with the constructor's options by name."""

    @abstractmethod
    def factor(self, progress: float) -> float:
        """Return the share of `lr` for a step, finite and not negative.

        `progress` is the completed share of the steps after the warm-up: 0 at the first of them, below 1 at the last.
        """

    def explain(self) -> str:
        """Return the class's name and its options in force."""
        return f"{type(self).__name__} {self.formula.format(**vars(self))}".rstrip()
