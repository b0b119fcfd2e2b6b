"""The interface of policy losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import LossOutput, PolicyOutput, TrainBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import Runtime
    from rlkit.ops.aggregate import Aggregation


class PolicyLoss(BoundPart):
    """Returns a loss for every token, not reduced: the training loop weights tokens by global counts.

    `aggregation` is the mode of `rlkit.ops.aggregate.weights` that the loss was published with; a recipe's
    `train.aggregation` overrides it. The training loop multiplies by `batch.correction_weights` unless
    `applies_correction` is set: the loss does so itself. `selects` marks a loss that treats chosen tokens apart.
    `compares` is unset in one that does not compare with `batch.old_logps`, so that it cannot correct for samples of
    another policy. `zero_without_advantage` marks one that has no gradient in a row whose advantages are all 0, which
    then needs no backward pass.
    """

    aggregation: ClassVar[Aggregation] = "token_mean"
    applies_correction: ClassVar[bool] = False
    selects: ClassVar[bool] = False
    compares: ClassVar[bool] = True
    zero_without_advantage: ClassVar[bool] = False
    formula: ClassVar[str] = "see its documentation"
    """The objective as `rlkit explain` shows it, with the constructor's options as `{name}`."""
    reduce: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Sums a tensor over all ranks."""
    gather: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Concatenates a vector of any length over all ranks."""

    def bind(self, runtime: Runtime) -> None:
        """Store what needs the run: called once process group, device and models exist."""
        self.reduce = runtime.reduce
        self.gather = runtime.gather

    def explain(self) -> str:
        """Return the formula with the options filled in."""
        return self.formula.format(**vars(self))

    @abstractmethod
    def __call__(self, out: PolicyOutput, batch: TrainBatch) -> LossOutput:
        """Compare `out.logps` with `batch.old_logps` under `batch.advantages`; all [B,T] f32."""

    def select(self, logps: Tensor, batch: TrainBatch) -> Tensor:
        """Return which tokens [B,T] bool of this rank's mini-batch are treated apart, as `batch.selected`.

        Called once a mini-batch, on every rank, with the current log-probs [B,T] and no gradient, if `selects`.
        """
        raise NotImplementedError(f"{type(self).__name__} has `selects = True`, but no `select` method")
