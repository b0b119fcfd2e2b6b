"""Rollouts that run ahead of the trainer: a step learns from the groups that are whole first."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import NamedTuple, TypeVar

from rlkit.errors import RolloutError
from rlkit.rollout.collect import BusyTimer, Sampler, converse
from rlkit.rollout.gate import Gate
from rlkit.rollout.service import RolloutService
from rlkit.rollout.tasks import cancel, run_concurrently
from rlkit.train.ahead.ledger import Ledger
from rlkit.train.data import Data
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts, finish, share_groups
from rlkit.types import Trajectory

T = TypeVar("T")


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

    def others(self, number: int) -> list[int]:
        """Return the first so many that are left, in order."""
        beyond = set(self.beyond)
        return list(islice((place for place in count(self.low) if place not in beyond), number))


@dataclass
class Group:
    """The samples of a prompt, its place in the order of the data, and the task that scores them."""

    place: int
    trajectories: list[Trajectory]
    scoring: asyncio.Task[None]

    def oldest(self, version: int) -> int:
        """Return the version of the oldest token; the given one where there is none."""
        return min((v for t in self.trajectories for v in t.versions if v >= 0), default=version)


class Stream(ABC):
    """Obtains the rollouts of each step; groups that are not whole by then go on, and later steps learn from them.

    An error of any group, be it of its sampling or its scoring, is raised when the next step begins at the latest; one
    is also raised if the trainer waits and nothing happens for `train.deadline` seconds.

    A group is sampled under the step and the place that it has in the order of the data, so that its tokens depend on
    the seed and on the weights alone, whatever step learns from it. All state is used on the service's event loop.

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
        places = trained.others(self._batch * (service.recipe.train.steps - service.version))
        self.trained = trained
        self._places = [place for i, place in enumerate(places) if (i % self._batch) % ranks.count == ranks.index]
        lead = min(1, rollout.max_staleness) if rollout.lead is None else rollout.lead
        self._first = service.version
        self._ledger = Ledger(len(self._slots), rollout.max_staleness, lead, len(self._places))
        self._gate = Gate()
        self._timer = BusyTimer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Of the groups that are being sampled, and of those whose sampling failed."""
        self._groups: dict[int, Group] = {}

    @property
    def _version(self) -> int:
        return self._service.version - self._first

    def __call__(self, data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
        """Return a step's rollouts, whose scoring may still be running; all ranks must call this."""
        groups = service.sample(self._watched(self._obtain(meter)))
        rollouts = Rollouts()
        for slot, group in zip(self._slots, groups, strict=True):
            rollouts.scoring.adopt(group.scoring)
            for trajectory in group.trajectories:
                trajectory.group = slot
            rollouts.all += group.trajectories
        for places in service.ranks.gather_dp([group.place for group in groups]):
            self.trained = self.trained.plus(places)
        rollouts.sampled = [t for t in rollouts.all if t.error is None]
        return share_groups(rollouts, service.ranks, meter)

    def close(self) -> None:
        """Cancel all that is being sampled or waits."""
        self._service.wait(self._cancel_all())

    @abstractmethod
    async def _obtain(self, meter: Meter) -> list[Group]:
        """Return the groups of a step once they are whole."""

    @abstractmethod
    def _note_whole(self) -> None:
        """Called at once when another group is whole."""

    def _admit(self) -> None:
        """Begin the groups whose turn it is."""
        for number in self._ledger.admit(self._version):
            self._gate.count(self._service.recipe.rollout.group_size)
            self._tasks[number] = asyncio.create_task(self._sample(number))

    async def _until_ready(self) -> None:
        """Wait until a step can begin; an error of any group is raised at once."""
        while True:
            working = self._working()
            if self._ledger.ready(self._version):
                return
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)

    def _working(self) -> list[asyncio.Task[None]]:
        """Return the tasks in progress.

        Raises:
            BaseException: One has failed.
        """
        tasks = [*self._tasks.values(), *(group.scoring for group in self._groups.values())]
        for task in tasks:
            if task.done():
                task.result()
        return [task for task in tasks if not task.done()]

    async def _watched(self, work: Coroutine[object, None, T]) -> T:
        """Do work that waits for groups.

        Raises:
            RolloutError: Nothing has happened for `train.deadline` seconds.
        """
        deadline, now = self._service.recipe.train.deadline, asyncio.get_running_loop().time
        task, begun = asyncio.create_task(work), now()
        try:
            while not task.done():
                left = max(begun, self._gate.changed) + deadline - now()
                if left <= 0:
                    raise RolloutError(self._stalled(deadline))
                await asyncio.wait((task,), timeout=left)
            return task.result()
        finally:
            await cancel(task)

    def _stalled(self, seconds: float) -> str:
        """Describe what each side is doing."""
        gate, engine = self._gate, type(self._service.engine).__name__
        return (
            f"rollouts made no progress for {seconds:g} s (train.deadline): the trainer waits, with "
            f"{len(self._ledger.whole)} of {len(self._slots)} groups of the next step; {gate.requests} requests are in "
            f"{engine}, and {gate.busy} conversations wait for something else, such as a tool; find out what hangs, or "
            "raise train.deadline if answers take as long"
        )

    async def _cut(self, meter: Meter) -> list[Group]:
        """Take the groups of a step out of those that are whole; cancel those that have become too old."""
        self._working()
        ledger, version = self._ledger, self._version
        ages = {number: version - oldest for number, oldest in ledger.whole.items()}
        cut = ledger.cut(version)
        await self._drop(cut.dropped)
        for number in cut.taken:
            meter.mean("staleness/mean", ages[number])
            meter.max("staleness/max", ages[number])
        meter.count("staleness/dropped", len(cut.dropped))
        meter.count("staleness/waiting", len(ledger.whole))
        meter.count("staleness/running", len(ledger.running))
        return [self._groups.pop(number) for number in cut.taken]

    def _sampler(self, step: int) -> Sampler:
        rollout = self._service.recipe.rollout
        sampler = self._service.sampler(rollout.sampling, rollout.group_size, step, timer=self._timer)
        return replace(sampler, gate=self._gate)

    async def _sample(self, number: int) -> None:
        """Sample a group to its end, over any number of steps."""
        place, service = self._places[number], self._service
        step, slot = divmod(place, self._batch)
        sampler, prompt = self._sampler(step + 1), self._data.prompt(self._data.row(place))
        busy = sampler.samples

        async def one(sample: int) -> Trajectory:
            nonlocal busy
            found = await converse(sampler, prompt, slot, sample)
            if busy > 1:  # the last one counts until it is known what follows from the group's end
                busy -= 1
                self._gate.count(-1)
            return found

        try:
            trajectories = await run_concurrently(*(one(sample) for sample in range(sampler.samples)))
            whole = [t for t in trajectories if t.error is None]
            group = Group(place, trajectories, asyncio.create_task(finish(service, whole)))
            self._groups[number] = group
            self._ledger.end(number, group.oldest(service.version) - self._first)
            del self._tasks[number]
            self._note_whole()
        finally:
            self._gate.count(-busy)

    async def _cancel_all(self) -> None:
        await self._drop([*self._tasks, *self._groups])

    async def _drop(self, numbers: Sequence[int]) -> None:
        groups = [self._groups.pop(number).scoring for number in numbers if number in self._groups]
        await cancel(*groups, *(self._tasks.pop(number) for number in numbers if number in self._tasks))
