"""A simulated run: the real stream, service and conversations over an engine, a user and a clock that are made up.

The clock is virtual: it jumps to the next moment at which anything happens, so that a history takes milliseconds, and a
deadlock is an error at once.
"""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch
from zlib import crc32

import torch

from rlkit.base.errors import EngineError, RolloutError
from rlkit.interfaces.engine import Capability, RolloutEngine
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.recipe import ConversationLimits, GroupReplay, Recipe, Rollout
from rlkit.rollout.participants import Participants
from rlkit.rollout.service import RolloutService
from rlkit.train.ahead.stream import BesideStream, ColocatedStream, RolloutStream, TrainedGroups
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts
from rlkit.types import Completion, Prompt, Rendered, Request, Sampling, Score, StopReason, Trajectory
from tests.unit import phases

T = TypeVar("T")

LONGEST_SECONDS = 10_000.0
"""No history takes as long: a longer one waits for what never comes, and looks from time to time whether it has."""


class Deadlock(Exception):
    """Nothing will ever happen again, though something is waited for."""


class Clock(selectors.DefaultSelector):
    """Jumps to the next deadline instead of waiting for it."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or self.now > LONGEST_SECONDS:
            raise Deadlock
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.clock = Clock()
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now


def run(work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns, on a virtual clock; no thread, process or socket may take part in it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(work)


class VirtualEventLoop:
    """What `RolloutService` needs of an event loop, in the caller's thread: the loop runs while the caller waits."""

    def __init__(self, prepare: Callable[[], None], warn: Callable[[str], None] = print) -> None:
        self.loop = VirtualLoop()
        self.errors: list[Any] = []
        self.interrupt_after: float | None = None
        self.loop.set_exception_handler(lambda _, context: self.errors.append(context))

    def run(self, work: Coroutine[object, None, T]) -> T:
        """Return what the work returns; a Ctrl-C cancels it, and is raised once it has ended."""
        task = self.loop.create_task(work)
        if self.interrupt_after is not None:
            after, self.interrupt_after = self.interrupt_after, None
            self.loop.run_until_complete(asyncio.wait((task,), timeout=after))
            if not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.wait((task,)))
                raise KeyboardInterrupt
        return self.loop.run_until_complete(task)

    def submit(self, work: Coroutine[object, None, T]) -> Future[T]:
        raise NotImplementedError

    def cancel_all(self) -> None:
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        if tasks:
            self.loop.run_until_complete(asyncio.wait(tasks, timeout=60))
        assert not asyncio.all_tasks(self.loop), "a task outlives the run"

    def close(self) -> None:
        self.loop.close()


@dataclass(frozen=True)
class Plan:
    """A run, and what happens to it.

    Args:
        beside: Whether the engine samples while the trainer learns.
        lead: `rollout.lead` as a share of the staleness.
        mean: Tokens of a turn on average; those of every eighth conversation are eight times as many.
        failing: The probability that a turn fails.
        dying: The probability that the engine fails in a step, in which the run ends.
        grading: The probability that the reward of a group fails, which ends the run too.
        dropping: The probability that the filter drops a prompt; None for no filter.
        refills: How many prompts may take the place of one that is dropped.
        replay: How many groups are trained on again, and how often; None for none.
        interrupted: The probability of a second Ctrl-C in a step.
        resuming: The probability that the run ends after a step, by a `kill -9` for instance.
        saving: The probability of a checkpoint after a step.
        token_seconds: How long the engine takes for a token of all requests.
        user_seconds: How long a user's reply may take.
        step_seconds: How long learning may take.
        pace: Seed of all times; those of lengths and failures follow from `seed` alone.
    """

    beside: bool = False
    batch: int = 2
    group_size: int = 2
    staleness: int = 1
    lead: float | None = None
    steps: int = 4
    turns: int = 2
    mean: int = 3
    failing: float = 0.0
    dying: float = 0.0
    grading: float = 0.0
    dropping: float | None = None
    refills: int = 0
    replay: GroupReplay | None = None
    interrupted: float = 0.0
    resuming: float = 0.0
    saving: float = 1.0
    token_seconds: float = 0.1
    user_seconds: float = 0.0
    step_seconds: float = 1.0
    seed: int = 0
    pace: int = 0

    def recipe(self) -> Recipe:
        rollout = Rollout(
            engine=Engine(self),
            group_size=self.group_size,
            sampling=Sampling(max_tokens=64),
            max_staleness=self.staleness,
            lead=None if self.lead is None else self.lead * self.staleness,
            filter=None if self.dropping is None else Dropping(self),
            replay=self.replay if self.staleness else None,
        )
        made = phases.recipe(train={"steps": self.steps, "prompts_per_step": self.batch, "seed": self.seed})
        conversation = ConversationLimits(turns=self.turns, seconds=50.0, check="off")
        return replace(made, rollout=rollout, interaction=User(self), conversation=conversation)

    def drops(self, prompt: str) -> bool:
        """Whether the filter drops a prompt."""
        return self.chance("drop", prompt) < (self.dropping or 0.0)

    def chance(self, *of: object) -> float:
        """Return a number from 0 to 1 that follows from the seed and what it is for."""
        return crc32(repr((self.seed, *of)).encode()) / 2**32


@dataclass
class Row:
    request: Request
    future: asyncio.Future[Completion]
    found: Completion = field(default_factory=lambda: Completion([], [], [], StopReason.LENGTH))

    def end(self, stop: StopReason) -> None:
        self.found.stop = stop
        if not self.future.done():
            self.future.set_result(self.found)


class Engine(RolloutEngine):
    """Samples a token of each request at a time; whether it is a turn's last follows from its place."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.capabilities = Capability.BESIDE if plan.beside else Capability.INTERRUPT
        self.pace = random.Random(f"{plan.pace} sync")
        self.version = 0
        self.rows: list[Row] = []
        self.fails_after: int | None = None
        self.failed = False
        self._calm: Any = None
        self._interrupting = False
        self._server: asyncio.Task[None] | None = None

    def bind(self, runtime: Any) -> None: ...

    def follow(self, calm: Any) -> None:
        self._calm = calm

    def interrupt(self) -> None:
        self._interrupting = self._server is not None and not self._server.done()

    async def sync(self, stream: Any, version: int) -> None:
        assert self.plan.beside or not self.rows, "the weights change under requests"
        if self.plan.beside:
            await asyncio.sleep(self.pace.random() * self.plan.step_seconds)
        self.version = version

    async def generate(self, request: Request) -> Completion:
        fails = self.plan.chance("fail", request.session, len(request.tokens)) < self.plan.failing
        if fails and self.plan.beside:  # servers may refuse a request at once
            raise RolloutError("this request failed")
        row = Row(request, asyncio.get_running_loop().create_future())
        self.rows.append(row)
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve())
        answer = await row.future
        if fails and answer.stop is not StopReason.INTERRUPTED:
            raise RolloutError("this request failed")
        return answer

    async def _serve(self) -> None:
        self._interrupting = False
        while self.rows:
            if self._calm is not None:
                await asyncio.sleep(0)
                await self._calm()
            if self._interrupting:
                self._interrupting = False
                self._end([(row, StopReason.INTERRUPTED) for row in self.rows])
                continue
            await asyncio.sleep(self.plan.token_seconds)
            self.rows = [row for row in self.rows if not row.future.done()]
            if self.fails_after is not None:
                self.fails_after -= 1
                if self.fails_after < 0:
                    self.failed = True
                    rows, self.rows = self.rows, []
                    for row in rows:
                        row.future.set_exception(EngineError("the engine died"))
                    return
            self._end([(row, stop) for row in self.rows if (stop := self._sample(row)) is not None])

    def _sample(self, row: Row) -> StopReason | None:
        request, found = row.request, row.found
        place = len(request.tokens) + len(found.tokens)
        mean = self.plan.mean * (8 if self.plan.chance(request.session) < 1 / 8 else 1)
        last = self.plan.chance(request.session, place) < 1 / mean
        found.tokens.append(9)
        found.logps.append(-1.0)
        found.versions.append(self.version)
        if last:
            return StopReason.STOP
        return StopReason.LENGTH if len(found.tokens) == request.sampling.max_tokens else None

    def _end(self, rows: list[tuple[Row, StopReason]]) -> None:
        for row, stop in rows:
            self.rows.remove(row)
            row.end(stop)


class Dropping(GroupFilter):
    """Drops prompts by their names."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.max_refills = plan, plan.refills

    def keep(self, group: Sequence[Trajectory]) -> bool:
        assert len({t.prompt.id for t in group}) == 1
        assert all(t.reward is not None for t in group)
        return not self.plan.drops(group[0].prompt.id)


class User(Interaction):
    """Replies after a while; now and then that takes longer than its deadline allows."""

    timeout = 5.0

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.pace = random.Random(plan.pace)

    def bind(self, runtime: Any) -> None: ...

    async def reply(self, messages: Any, state: Any) -> Reply:
        await asyncio.sleep(self.pace.random() * self.plan.user_seconds)
        return Reply([{"role": "user", "content": "go on"}], done=False)


TEMPLATE: Any = SimpleNamespace(
    render_start=lambda messages, tools: Rendered([1] * len(messages)),
    render_delta=lambda messages, after: Rendered([1] * len(messages)),
    reader=None,
    codec=SimpleNamespace(
        plain=lambda message: message,
        count=len,
        turn=lambda tokens, special: "x" * len(tokens),
        opened_thinking=lambda prompt: "",
    ),
)
"""Renders each message as one token."""


ACTOR: Any = SimpleNamespace(policy=torch.nn.Module())


class Service(RolloutService):
    """Scores after a while."""

    def __init__(self, plan: Plan, session: int) -> None:
        self.plan, self.pace = plan, random.Random(f"{plan.pace} score {session}")
        recipe = plan.recipe()
        participants = Participants(interaction=recipe.interaction)
        dialogue: Any = SimpleNamespace(template=TEMPLATE, participants=participants, context=1 << 20)
        ranks: Any = phases.LocalRanks()
        ranks.any = bool
        fabric = SimpleNamespace(device=None, world_size=1, strategy=None)
        with (
            patch("rlkit.rollout.service.EventLoop", VirtualEventLoop),
            patch.object(phases.LocalRanks, "fabric", fabric),
        ):
            super().__init__(recipe, dialogue, ACTOR, ranks)
        self.clock: Any = self._loop
        self.failed = False
        self.tokens: list[list[int]] = []
        """Of all trajectories that were trained on, once for each time."""

    async def score(self, reward: Any, trajectories: Any) -> list[Score]:
        await asyncio.sleep(self.pace.random() * self.plan.step_seconds * 3)
        if self.pace.random() < self.plan.grading:
            self.failed = True
            raise RolloutError("the reward failed, which is told to end the run")
        return [Score(1.0) for _ in trajectories]


class Data:
    """Prompts named by their places; notes which have begun, and checks that they are not too many."""

    def __init__(self, plan: Plan, service: Service) -> None:
        self.plan, self.service, self.first = plan, service, service.version
        self.begun: set[int] = set()
        self.order = self

    def at(self, position: int) -> int:
        return position

    def prompt(self, row: int) -> Prompt:
        self.begun.add(row)
        steps = self.plan.staleness + 1 + self.service.version - self.first
        assert len(self.begun) <= steps * self.plan.batch, "more was admitted than may become too old"
        return Prompt(str(row), [{"role": "user", "content": "go"}])

    def spare(self, step: int, attempt: int, slot: int) -> Prompt:
        place = (step - 1) * self.plan.batch + slot
        return Prompt(f"{place} again {attempt}", [{"role": "user", "content": "go"}])


@dataclass
class Step:
    """What a step was trained on: the places, and the versions of the tokens."""

    places: list[int]
    versions: list[list[int]]


def simulate(plan: Plan) -> list[Step]:
    """Make a run with all that happens to it; return the steps that its last checkpoint knows and those after it.

    Checks after each step that what is trained on may be, and at the end that each prompt was, once.
    """
    chance = random.Random(f"{plan.seed} events")
    steps: list[Step] = []
    saved: tuple[int, TrainedGroups] = (0, TrainedGroups())
    for session in count():
        steps = steps[: saved[0]]
        if len(steps) == plan.steps:
            break
        if session == 20:  # enough has happened
            plan = replace(plan, dying=0.0, grading=0.0, interrupted=0.0, resuming=0.0)
        saved = _session(plan, session, steps, saved, chance)
    everything = [place for step in steps for place in step.places]
    assert sorted(everything) == list(range(plan.batch * plan.steps)), "a prompt was lost, or trained on twice"
    return steps


def open_stream(plan: Plan, service: Service, data: Any, trained: TrainedGroups) -> RolloutStream:
    return (BesideStream if plan.beside else ColocatedStream)(data, service, trained)


def _session(
    plan: Plan, session: int, steps: list[Step], saved: tuple[int, TrainedGroups], chance: random.Random
) -> tuple[int, TrainedGroups]:
    """Make steps until the run ends, well or otherwise; return the last checkpoint."""
    service = Service(plan, session)
    service.version = saved[0]
    data: Any = Data(plan, service)
    pace = random.Random(f"{plan.pace} steps")
    try:
        service.sync_weights()
        stream = open_stream(plan, service, data, saved[1])
        while len(steps) < plan.steps:
            engine: Any = service.engine
            engine.fails_after = chance.randrange(20) if chance.random() < plan.dying else None
            if chance.random() < plan.interrupted:
                service.clock.interrupt_after = chance.random() * 4
            broken = engine.failed or service.failed
            rollouts = stream(data, service, len(steps) + 1, Meter())
            assert plan.beside or not engine.rows, "requests are left in the engine"
            assert not plan.beside or not stream._ledger.admit(stream._version), "the engine could have more work"
            service.wait(rollouts.scoring.wait())
            assert not broken, "the run went on after something had failed"
            assert plan.beside or not engine.failed, "a step began after the engine had failed"
            steps.append(_check(plan, service, rollouts, len(steps)))
            service.wait(asyncio.sleep(pace.random() * plan.step_seconds))
            service.version += 1
            service.sync_weights()
            if chance.random() < plan.saving or len(steps) == plan.steps:
                saved = len(steps), stream.trained
            if chance.random() < plan.resuming:
                return saved
        stream.close()
        assert not asyncio.all_tasks(service.clock.loop), "something goes on after the last step"
        assert not service.clock.errors
    except (EngineError, RolloutError, KeyboardInterrupt):
        pass
    finally:
        service.close()
    return saved


def _check(plan: Plan, service: Service, rollouts: Rollouts, done: int) -> Step:
    """Check what a step trains on: scored groups, each of a prompt that the filter keeps, no token older than allowed.

    New groups are of all places of the step, with all prompts that were tried in turn; others were trained on before.
    """
    groups: dict[int, list[Trajectory]] = {}
    for trajectory in rollouts.sampled:
        groups.setdefault(trajectory.group, []).append(trajectory)
        assert trajectory.error is None
        assert trajectory.score is not None
        assert all(v == -1 or done - plan.staleness <= v <= done for v in trajectory.versions), "a token is too old"
    assert all(len({t.prompt.id for t in group}) == 1 for group in groups.values())
    tried: dict[int, list[Trajectory]] = {}
    for trajectory in rollouts.all:
        tried.setdefault(trajectory.group, []).append(trajectory)
        assert (trajectory.error is None) == (trajectory.score is not None)
    assert sorted(tried) == list(range(plan.batch))
    for slot, some in tried.items():
        prompts = {t.prompt.id for t in some}
        assert len(some) == plan.group_size * len(prompts) <= plan.group_size * (1 + plan.refills)
        assert len({_place(t) for t in some}) == 1, "a group has samples of two places"
        kept = [t for t in some if t.error is None and not plan.drops(t.prompt.id)]
        assert {id(t) for t in groups.pop(slot, [])} == {id(t) for t in kept}
    _check_again(plan, service, groups)
    service.tokens += [t.tokens for t in rollouts.sampled]
    ordered = [sorted(tried[slot], key=lambda t: t.prompt.id) for slot in range(plan.batch)]
    return Step([_place(group[0]) for group in ordered], [t.versions for group in ordered for t in group])


def _check_again(plan: Plan, service: Service, groups: dict[int, list[Trajectory]]) -> None:
    """Check groups that are trained on again: of those that were trained on, few enough, and not too often."""
    assert len(groups) <= (0 if plan.replay is None else plan.replay.size)
    for trajectory in (t for group in groups.values() for t in group):
        before = sum(tokens is trajectory.tokens for tokens in service.tokens)
        assert plan.replay is not None
        assert 1 <= before == trajectory.credit["again"] <= plan.replay.reuse


def _place(trajectory: Trajectory) -> int:
    return int(trajectory.prompt.id.split()[0])
