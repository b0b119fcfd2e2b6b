"""Rollouts ahead of the trainer on its own device: what is not whole when a step begins is interrupted."""

from __future__ import annotations

from math import inf

from rlkit.data.data import Data
from rlkit.rollout.service import RolloutService
from rlkit.train.ahead.group import PromptGroup
from rlkit.train.ahead.stream import RolloutStream, TrainedGroups
from rlkit.train.metrics import Meter


class ColocatedStream(RolloutStream):
    """Samples between steps only: the requests that a step interrupts continue with the weights after it.

    The engine decodes only while all conversations wait for it: which tokens are sampled by which weights is
    repeatable, if the engine can do so.
    """

    def __init__(self, data: Data, service: RolloutService, trained: TrainedGroups) -> None:
        super().__init__(data, service, trained)
        service.engine.follow(self._gate.calm)

    def _usual_lead(self) -> float:
        """Return the lead, in steps, that fills the engine, but at least one: more groups would grow old in its queue.

        With a replay buffer it is a step, or groups would be too old for a second time.
        """
        capacity, rollout = self._service.engine.capacity, self._service.recipe.rollout
        if rollout.replay is not None:
            return 1.0
        return inf if capacity is None else max(1.0, capacity / (rollout.group_size * max(1, len(self._slots))) - 1)

    async def _obtain(self, meter: Meter) -> list[PromptGroup]:
        self._timer.idle_share()
        self._admit()
        if not self._ledger.ready(self._version):
            self._gate.open()
            try:
                await self._until_ready()
            finally:
                self._gate.close()
            await self._gate.quiet()
            await self._gate.calm()  # or which groups are whole would depend on how fast tools are
        meter.max("time/engine_idle_share", self._timer.idle_share())
        return await self._cut(meter)

    def _on_complete(self) -> None:
        if self._gate.is_open and self._ledger.ready(self._version):
            self._gate.close()
            self._service.engine.interrupt()
