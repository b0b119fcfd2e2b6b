"""The interface of advantage estimators: from rewards to an advantage for each token."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from enum import Flag, auto
from typing import ClassVar

from rlkit.interfaces.runtime import ReducingPart
from rlkit.types import Batch


class Needs(Flag):
    """What an estimator reads besides rewards and mask. The recipe must provide it."""

    NOTHING = 0
    GROUPS = auto()
    """At least two samples of each prompt."""
    VALUES = auto()
    """A critic's values."""
    GREEDY = auto()
    """The reward of a greedy completion of each prompt."""
    COMPONENTS = auto()
    """A reward that reports its components."""
    OLD_LOGPS = auto()
    """The trainer's log-probs before the update."""
    SUM_PI_SQUARED = auto()
    """The sum of squared probabilities at each token, under the policy before the update."""
    REFERENCE_REWARDS = auto()
    """Rewards of the reference's samples of each prompt, in the rows' column `reference_rewards`."""
    ROLES = auto()
    """The roles of an agent's conversations."""


class AdvantageEstimator(ReducingPart):
    """Fills `batch.advantages` [B,T] f32, 0 outside the mask, and `batch.returns` if the recipe has a critic."""

    needs: ClassVar[Needs] = Needs.NOTHING

    @abstractmethod
    def estimate(self, batch: Batch) -> None:
        """Write the advantages into the batch; read from `token_rewards`, `mask` and `group`."""

    def state_dict(self) -> dict[str, float]:
        """Return the numbers that the next step depends on, alike on all ranks; checkpoints hold them."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore on every rank what `state_dict` returned."""
