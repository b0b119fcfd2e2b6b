"""The interface of advantage estimators: from rewards to an advantage for each token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from enum import Flag, auto
from typing import TYPE_CHECKING, ClassVar

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import Batch

if TYPE_CHECKING:
    from torch import Tensor

    from rlkit.interfaces.runtime import Runtime


class Needs(Flag):
    """What an estimator reads besides rewards and mask; the recipe must provide it."""

    NOTHING = 0
    GROUPS = auto()
    """At least two samples of each prompt."""
    VALUES = auto()
    """A critic's values."""
    GREEDY = auto()
    """The reward of a greedy answer to each prompt."""
    COMPONENTS = auto()
    """A reward that reports its components."""
    OLD_LOGPS = auto()
    """The trainer's log-probs before the update."""
    SUM_PI_SQUARED = auto()
    """The sum of squared probabilities at each token, under the policy before the update."""


class AdvantageEstimator(BoundPart):
    """Fills `batch.advantages` [B,T] f32, 0 outside the mask; and `batch.returns` where a critic learns."""

    needs: ClassVar[Needs] = Needs.NOTHING
    formula: ClassVar[str] = "see its documentation"
    """The objective as `rlkit explain` shows it, with the constructor's options as `{name}`."""
    reduce: Callable[[Tensor], Tensor] = staticmethod(lambda x: x)
    """Sums a tensor over all ranks, for statistics of the whole batch. A group is always on one rank."""

    def bind(self, runtime: Runtime) -> None:
        """Store what needs the run: called once process group, device and models exist."""
        self.reduce = runtime.reduce

    def explain(self) -> str:
        """Return the formula with the options filled in."""
        return self.formula.format(**vars(self))

    @abstractmethod
    def estimate(self, batch: Batch) -> None:
        """Write the advantages into the batch; read from `token_rewards`, `mask` and `group`."""
