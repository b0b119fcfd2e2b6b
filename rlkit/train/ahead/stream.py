"""Rollouts that run ahead of the trainer on its own device: a step learns from the groups that are whole first."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple

from rlkit.rollout.collect import converse
from rlkit.rollout.gate import Gate
from rlkit.rollout.service import RolloutService
from rlkit.rollout.tasks import cancel, run_concurrently
from rlkit.train.ahead.ledger import Ledger
from rlkit.train.data import Data
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts, finish, share_groups
from rlkit.types import Trajectory


class TrainedPlaces(NamedTuple):
    """The groups that a run was trained on: all before `low`, and `beyond`."""

    low: int = 0
    beyond: tuple[int, ...] = ()

    def plus(self, places: Iterable[int]) -> TrainedPlaces:
        """Return these and others."""
        low, beyond = self.low, {*self.beyond, *places}
        while low in beyond:
            beyond.remove(low)
            low += 1
        return TrainedPlaces(low, tuple(sorted(beyond)))

    def others(self, total: int) -> list[int]:
        """Return those that are left of so many, in order."""
        beyond = set(self.beyond)
        return [place for place in range(self.low, total) if place not in beyond]


@dataclass
class Group:
    """The samples of a prompt, and the task that scores them."""

    trajectories: list[Trajectory]
    scoring: asyncio.Task[None]

    def oldest(self, version: int) -> int:
        """Return the version of the oldest token; the given one where there is none."""
        return min((v for t in self.trajectories for v in t.versions if v >= 0), default=version)


class Stream:
    """Obtains the rollouts of each step; groups that are not whole by then go on with the weights after it.

    A group is sampled under the step and the place that it has in the order of the data, so that its tokens depend on
    the seed and on the weights alone, whatever step learns from it. The engine decodes only while all conversations
    wait for it: which tokens are sampled by which weights is repeatable.

    Args:
        data: The prompts; their order follows from the seed.
        service: Samples and scores.
        trained: The groups that were trained on before; they are counted in the order of the data.
    """

    def __init__(self, data: Data, service: RolloutService, trained: TrainedPlaces) -> None:
        rollout, ranks = service.recipe.rollout, service.ranks
        self._data, self._service = data, service
        self._batch = service.recipe.train.prompts_per_step
        self._slots = range(self._batch)[ranks.index :: ranks.count]
        places = trained.others(self._batch * service.recipe.train.steps)
        self.trained = trained
        self._places = [place for i, place in enumerate(places) if (i % self._batch) % ranks.count == ranks.index]
        lead = min(1, rollout.max_staleness) if rollout.lead is None else rollout.lead
        self._first = service.version
        self._ledger = Ledger(len(self._slots), rollout.max_staleness, lead, len(self._places))
        self._gate = Gate()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._groups: dict[int, Group] = {}
        self._ready = asyncio.Event()
        service.engine.follow(self._gate.calm)

    @property
    def _version(self) -> int:
        return self._service.version - self._first

    def __call__(self, data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
        """Return a step's rollouts, whose scoring may still be running; all ranks must call this."""
        service.sample(self._run())
        ledger, version = self._ledger, self._version
        ages = {group: version - oldest for group, oldest in ledger.whole.items()}
        cut = ledger.cut(version)
        service.wait(self._drop(cut.dropped))
        rollouts = Rollouts()
        for slot, taken in zip(self._slots, cut.taken, strict=True):
            group = self._groups.pop(taken)
            rollouts.scoring.adopt(group.scoring)
            for trajectory in group.trajectories:
                trajectory.group = slot
            rollouts.all += group.trajectories
            meter.mean("staleness/mean", ages[taken])
            meter.max("staleness/max", ages[taken])
        for places in service.ranks.gather_dp([self._places[taken] for taken in cut.taken]):
            self.trained = self.trained.plus(places)
        meter.count("staleness/dropped", len(cut.dropped))
        meter.count("staleness/waiting", len(ledger.whole))
        meter.count("staleness/running", len(ledger.running))
        rollouts.sampled = [t for t in rollouts.all if t.error is None]
        return share_groups(rollouts, service.ranks, meter)

    async def _run(self) -> None:
        """Sample until a batch is whole on this rank; interrupt the rest."""
        version = self._version
        self._ready.clear()
        for number in self._ledger.admit(version):
            self._gate.count(self._service.recipe.rollout.group_size)
            self._tasks[number] = asyncio.create_task(self._sample(number))
        if self._ledger.ready(version):
            return
        self._gate.open()
        ready = asyncio.create_task(self._ready.wait())
        try:
            while not ready.done():
                done, _ = await asyncio.wait((ready, *self._tasks.values()), return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()  # an error ends the step at once
        finally:
            self._gate.close()
            await cancel(ready)
        await self._gate.quiet()
        await self._gate.calm()  # or which groups are whole would depend on how fast tools are

    async def _sample(self, number: int) -> None:
        """Sample a group to its end, over any number of steps."""
        service, rollout = self._service, self._service.recipe.rollout
        step, slot = divmod(self._places[number], self._batch)
        sampler = service.sampler(rollout.sampling, rollout.group_size, step + 1)
        sampler = replace(sampler, gate=self._gate, admission=nullcontext())
        prompt = self._data.prompt(self._data.row(self._places[number]))
        busy = rollout.group_size

        async def one(sample: int) -> Trajectory:
            nonlocal busy
            found = await converse(sampler, prompt, slot, sample)
            if busy > 1:  # the last one counts until it is known what follows from the group's end
                busy -= 1
                self._gate.count(-1)
            return found

        try:
            trajectories = await run_concurrently(*(one(sample) for sample in range(rollout.group_size)))
            whole = [t for t in trajectories if t.error is None]
            group = Group(trajectories, asyncio.create_task(finish(service, whole)))
            self._groups[number] = group
            self._ledger.end(number, group.oldest(service.version) - self._first)
            del self._tasks[number]
            if self._ledger.ready(self._version) and not self._ready.is_set():
                self._ready.set()
                self._gate.close()
                service.engine.interrupt()
        finally:
            self._gate.count(-busy)

    async def _drop(self, numbers: Sequence[int]) -> None:
        groups = [self._groups.pop(number).scoring for number in numbers if number in self._groups]
        await cancel(*groups, *(self._tasks.pop(number) for number in numbers if number in self._tasks))
