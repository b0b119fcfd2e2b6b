"""The interface of a policy loss."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rlkit.ops.aggregate import Aggregation
from rlkit.types import Batch, LossOutput, PolicyOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import Runtime


class PolicyLoss(ABC):
    """Returns a loss for every token; it never divides: the loop weighs tokens by global counts.

    `aggregation` is the mode of `rlkit.ops.aggregate.weights` that the loss was published with; a recipe's
    `train.aggregation` overrides it. The loop multiplies by `batch.correction_weights`, unless the loss does so itself
    and says `applies_correction`. A loss that treats some tokens of the mini-batch apart says `selects`.
    """

    aggregation: ClassVar[Aggregation] = "token_mean"
    applies_correction: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    formula: ClassVar[str] = "see its documentation"
    """What `explain` gives, with the constructor's options by name."""
    reduce: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Sums a tensor over all ranks."""
    gather: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Concatenates a vector of any length over all ranks."""

    def bind(self, runtime: Runtime) -> None:
        """Receive what exists only once the run does."""
        self.reduce = runtime.reduce
        self.gather = runtime.gather

    def explain(self) -> str:
        """Return the formula in force, the options filled in."""
        return self.formula.format(**vars(self))

    @abstractmethod
    def __call__(self, out: PolicyOutput, batch: Batch) -> LossOutput:
        """Compare `out.logps` with `batch.old_logps` under `batch.advantages`; all [B,T] f32."""

    def select(self, logps: Tensor, batch: Batch) -> Tensor:
        """Return which tokens [B,T] bool of this rank's mini-batch are treated apart, as `batch.selected`.

        Called once a mini-batch, on every rank, with the current log-probs [B,T] and no gradient, if `selects`.
        """
        raise NotImplementedError(f"{type(self).__name__} says that it selects tokens, but has no `select`")
