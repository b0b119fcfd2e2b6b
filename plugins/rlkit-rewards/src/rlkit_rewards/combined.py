"""What rewards of several rewards have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlkit.base.ranges import Seconds
from rlkit.interfaces.reward import OnError, RewardManager, sum_counts
from rlkit.registry import close_parts

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class CombinedReward(RewardManager):
    """Scores by other rewards: they are bound and closed with it, and it counts, fills and reads what they do.

    Args:
        rewards: Rewards by name.
        timeout: Seconds for the samples of one prompt.
        on_error: What happens to a group with a failed score.
    """

    def __init__(self, rewards: Mapping[str, RewardManager], timeout: Seconds, on_error: OnError) -> None:
        self.rewards = rewards
        self.timeout = timeout
        self.on_error = on_error
        limits = [r.concurrency for r in rewards.values() if r.concurrency is not None]
        self.concurrency = max(limits, default=None)
        self.fills = [field for r in rewards.values() for field in r.fills]
        self.reads_fields = [name for r in rewards.values() for name in r.reads_fields]

    def bind(self, runtime: Runtime) -> None:
        self.runtime = runtime
        for reward in self.rewards.values():
            reward.bind(runtime)

    def close(self) -> None:
        close_parts(list(self.rewards.values()))

    def counts(self) -> Mapping[str, float]:
        return sum_counts(self.rewards.values())
