"""Rollouts ahead of the trainer on other devices: sampling goes on while the trainer learns."""

from __future__ import annotations

from rlkit.data.data import Data
from rlkit.rollout.service import RolloutService
from rlkit.train.ahead.group import PromptGroup
from rlkit.train.ahead.stream import RolloutStream, TrainedGroups
from rlkit.train.metrics import Meter


class BesideStream(RolloutStream):
    """Samples all the time, with weights that the engine takes in the middle of requests.

    The trainer waits until a batch is whole. As many groups as may run ahead are begun before it learns and after, so
    that the engine has work meanwhile; an error of one is raised at the next step.
    """

    def __init__(self, data: Data, service: RolloutService, trained: TrainedGroups) -> None:
        super().__init__(data, service, trained)
        self._gate.open()

    def _usual_lead(self) -> float:
        return 1.0

    async def _obtain(self, meter: Meter) -> list[PromptGroup]:
        self._admit()
        await self._until_ready()
        groups = await self._cut(meter)
        self._admit()
        meter.max("time/engine_idle_share", self._timer.idle_share())
        return groups

    def _on_complete(self) -> None: ...
