"""Rollouts that run ahead of the trainer: a step trains on the first groups to complete.

On other devices, sampling goes on while the trainer learns; on its own device, a step interrupts what is not complete.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Iterable, Sequence
from itertools import count, islice
from math import inf
from typing import NamedTuple, TypeVar

from rlkit.base.errors import RolloutError
from rlkit.base.tasks import cancel, run_concurrently
from rlkit.data.data import Data
from rlkit.interfaces.advantage import Needs
from rlkit.recipe import GroupReplay
from rlkit.rollout.collect import BusyTimer, ConversationSetup, converse
from rlkit.rollout.gate import Gate
from rlkit.rollout.service import RolloutService
from rlkit.train.ahead.buffer import ReplayBuffer
from rlkit.train.ahead.group import PromptGroup
from rlkit.train.ahead.ledger import Ledger
from rlkit.train.metrics import Meter, log_by_source
from rlkit.train.rollouts import Rollouts, share_groups
from rlkit.train.sampling import score_group
from rlkit.types import Trajectory

T = TypeVar("T")


class TrainedGroups(NamedTuple):
    """The groups that a run was trained on: all before `low`, and `beyond`."""

    low: int = 0
    beyond: tuple[int, ...] = ()

    def plus(self, positions: Iterable[int]) -> TrainedGroups:
        """Return these and others."""
        low, beyond = self.low, {*self.beyond, *positions}
        while low in beyond:
            beyond.remove(low)
            low += 1
        return TrainedGroups(low, tuple(sorted(beyond)))

    def next_untrained(self, number: int) -> list[int]:
        """Return the first n remaining positions, in order."""
        beyond = set(self.beyond)
        return list(islice((position for position in count(self.low) if position not in beyond), number))


class RolloutStream(ABC):
    """Obtains the rollouts of each step; unfinished groups continue, and later steps train on them.

    An error of any group, be it of its sampling or its scoring, is raised when the next step begins at the latest; one
    is also raised if the trainer waits and nothing happens for `train.deadline` seconds.

    A group is sampled under the step and the index that its position in the order of the data gives it. So its tokens
    depend on the seed and the weights alone, whatever step trains on it. All state is used on the service's event loop.

    Args:
        data: The prompts; their order follows from the seed.
        service: Samples and scores.
        trained: The groups that were trained on before; they are counted in the order of the data.
    """

    def __init__(self, data: Data, service: RolloutService, trained: TrainedGroups) -> None:
        rollout, ranks = service.recipe.rollout, service.ranks
        self._data, self._service = data, service
        self._batch = service.recipe.train.prompts_per_step
        self._slots = service.shard_for_rank(range(self._batch))
        positions = trained.next_untrained(self._batch * (service.recipe.train.total_steps - service.version))
        self.trained = trained
        self._positions = [
            position for i, position in enumerate(positions) if (i % self._batch) % ranks.count == ranks.index
        ]
        lead = min(self._usual_lead() if rollout.lead is None else rollout.lead, rollout.max_staleness)
        self._first, self._version = service.version, 0
        """The version of the weights at the start, and how many more they were when the last step began: the engine may
        sample with these until it has taken the next ones."""
        self._ledger = Ledger(len(self._slots), rollout.max_staleness, lead, len(self._positions))
        self._gate = Gate()
        self._timer = BusyTimer()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        """Of the groups that are being sampled, and of those whose sampling failed."""
        self._groups: dict[int, PromptGroup] = {}
        self._greedy = Needs.GREEDY in service.recipe.needs
        replay = rollout.replay or GroupReplay(0)
        self._slots_again = service.shard_for_rank(range(self._batch, self._batch + replay.size))
        self._buffer = ReplayBuffer(len(self._slots_again), replay.reuse, rollout.max_staleness)

    def __call__(self, data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
        """Return a step's rollouts, whose scoring may still be running; all ranks must call this."""
        self._version = service.version - self._first
        groups = service.sample(self._watched(self._obtain(meter)))
        again = self._buffer.draw()
        rollouts = Rollouts(greedy={} if self._greedy else None)
        for slot, group in zip(self._slots, groups, strict=True):
            group.add_to(rollouts, slot)
        for slot, group in zip(self._slots_again, again, strict=False):
            group.add_again_to(rollouts, slot)
        self._buffer.add(groups, self._version)
        self._log(groups, again, meter)
        for positions in service.ranks.gather_dp([group.position for group in groups]):
            self.trained = self.trained.plus(positions)
        return share_groups(rollouts, service.ranks, meter)

    def close(self) -> None:
        """Cancel all that is being sampled or waits."""
        self._service.wait(self._drop(list(self._groups)))

    @abstractmethod
    def _usual_lead(self) -> float:
        """Return the default lead of rollouts, in steps."""

    @abstractmethod
    async def _obtain(self, meter: Meter) -> list[PromptGroup]:
        """Return the groups of a step once they are whole."""

    def _on_complete(self) -> None:
        """Called at once when another group is whole."""

    def _admit(self) -> None:
        """Begin the groups whose turn it is."""
        for number in self._ledger.admit(self._version):
            position = self._positions[number]
            self._groups[number] = group = PromptGroup(position, self._data.prompt(self._data.order.at(position)))
            self._gate.count(group.busy)
            self._tasks[number] = asyncio.create_task(self._sample(number, group))

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
        scoring = [group.scoring for group in self._groups.values() if group.scoring is not None]
        tasks = [*self._tasks.values(), *scoring]
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
                seconds_left = max(begun, self._gate.changed) + deadline - now()
                if seconds_left <= 0:
                    gate, engine = self._gate, type(self._service.engine).__name__
                    raise RolloutError(
                        f"rollouts made no progress for {deadline:g} s (train.deadline): the trainer waits, with "
                        f"{len(self._ledger.complete)} of {len(self._slots)} groups of the next step; {gate.requests} "
                        f"requests are in {engine}, and {gate.busy} conversations wait for something else, such as a "
                        "tool; find out what hangs, or raise train.deadline if completions take as long"
                    )
                await asyncio.wait((task,), timeout=seconds_left)
            return task.result()
        finally:
            await cancel(task)

    async def _cut(self, meter: Meter) -> list[PromptGroup]:
        """Take the groups of a step out of those that are whole; cancel those that have become too old."""
        self._working()
        ledger, cut = self._ledger, self._ledger.cut(self._version)
        meter.count("staleness/dropped", 0)
        log_by_source(meter.count, "staleness/dropped", [(self._groups[number].prompt, 1) for number in cut.dropped])
        meter.count("staleness/waiting", len(ledger.complete))
        meter.count("staleness/running", len(ledger.running))
        await self._drop(cut.dropped)
        return [self._groups.pop(number) for number in cut.trained_on]

    def _log(self, groups: Sequence[PromptGroup], again: Sequence[PromptGroup], meter: Meter) -> None:
        """Log what the filter dropped, what is trained on again, and the ages of all that is trained on."""
        rollout = self._service.recipe.rollout
        for group in groups:
            log_by_source(meter.mean, "filter/dropped", group.verdicts)
        if rollout.filter is not None:
            meter.count("filter/refilled", sum(group.attempts - 1 for group in groups))
        if rollout.replay is not None:
            meter.count("replay/groups", len(again))
            meter.count("replay/kept", len(self._buffer.groups))
        ages = [(group.prompt, self._version - group.oldest) for group in (*groups, *again) if group.complete]
        log_by_source(meter.mean, "staleness/mean", ages)
        for _, age in ages:
            meter.max("staleness/max", age)
            for other_age in range(rollout.max_staleness + 1):
                meter.mean(f"staleness/share/{other_age}", float(age == other_age))

    async def _sample(self, number: int, group: PromptGroup) -> None:
        """Sample a group to its end, over any number of steps, and again while the filter drops it."""
        group_filter = self._service.recipe.rollout.filter
        try:
            for attempt in range(1 + (0 if group_filter is None else group_filter.max_refills)):
                if attempt:
                    self._ledger.renew(number, self._version)
                await self._attempt(group, attempt)
                if group_filter is None or await group.passes(group_filter):
                    break
            group.oldest = group.oldest_token(self._first + self._version) - self._first
            self._ledger.end(number, group.oldest)
            del self._tasks[number]
            self._on_complete()
        finally:
            self._gate.count(-group.busy)

    async def _attempt(self, group: PromptGroup, attempt: int) -> None:
        """Sample a group's prompt, or a spare one after the first attempt, and start to score its samples."""
        rollout = self._service.recipe.rollout
        index, slot = divmod(group.position, self._batch)
        step = index + 1
        if attempt:
            group.prompt = self._data.spare(step, attempt - 1, slot)
        setup = self._service.conversation_setup(
            rollout.sampling, rollout.group_size, step, attempt=attempt, timer=self._timer, gate=self._gate
        )
        conversations = [(setup, sample) for sample in range(setup.samples)]
        if self._greedy:
            conversations.append((setup.most_likely(), 0))
        self._gate.count(len(conversations) - group.busy)
        group.busy = len(conversations)

        async def sample_one(setup: ConversationSetup, sample: int) -> Trajectory:
            trajectory = await converse(setup, group.prompt, slot, sample)
            if group.busy > 1:  # the last one counts until it is known what follows from the group's end
                group.busy -= 1
                self._gate.count(-1)
            return trajectory

        trajectories = await run_concurrently(*(sample_one(*conversation) for conversation in conversations))
        group.attempts, group.trajectories = attempt + 1, trajectories[: setup.samples]
        group.greedy = trajectories[-1] if self._greedy else None
        group.scoring = asyncio.create_task(self._score(group))

    async def _score(self, group: PromptGroup) -> None:
        greedy = [t for t in (group.greedy,) if t is not None and t.error is None]
        await run_concurrently(score_group(self._service, group.complete), score_group(self._service, greedy))

    async def _drop(self, numbers: Sequence[int]) -> None:
        groups = [self._groups.pop(number) for number in numbers]
        scoring = [group.scoring for group in groups if group.scoring is not None]
        await cancel(*scoring, *(self._tasks.pop(number) for number in numbers if number in self._tasks))
        for task in scoring:
            if not task.cancelled():
                task.result()  # a reward that is told to end the run does so for a group too old to train on


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
