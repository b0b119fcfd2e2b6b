"""The rollout service: its event loop goes on while the trainer's thread is blocked, and nothing outlives its end."""

from __future__ import annotations

import asyncio
import inspect
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from rlkit.base.deadlines import deadline
from rlkit.base.errors import EngineError, RolloutError
from rlkit.base.tasks import Background, run_concurrently
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.parsers import HermesParser
from rlkit.recipe import ConversationLimits
from rlkit.rollout import loop as loop_module
from rlkit.rollout import service as module
from rlkit.rollout.collect import collect
from rlkit.rollout.loop import EventLoop
from rlkit.rollout.participants import Participants
from rlkit.rollout.service import RolloutService
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.workers import Workers
from rlkit.testing import ScriptedEngine, example_trajectory
from rlkit.types import Completion, Message, Prompt, Request, Sampling, Score, Trajectory
from tests.conftest import ROOT
from tests.unit.rollout.test_conversation import PROMPT, TOKENIZER, call
from tests.unit.simulation import VirtualEventLoop

T = TypeVar("T")

TIMEOUT, WORK = 0.5, 0.15
SAFETY_SECONDS = 60.0


def nothing() -> None: ...


async def ignore(group: list[Trajectory]) -> None: ...


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    made = EventLoop(nothing)
    yield made
    made.close()


@pytest.fixture
def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Services have event loops on virtual clocks, in the caller's thread."""
    monkeypatch.setattr(module, "EventLoop", VirtualEventLoop)


class Slow:
    """Takes `WORK` seconds for everything, or for ever, with a deadline then; counts how many calls run at once."""

    def __init__(self, hangs: bool = False) -> None:
        self.seconds = 600.0 if hangs else WORK
        self.timeout = TIMEOUT if hangs else SAFETY_SECONDS
        self.running = self.most = self.released = 0

    async def work(self) -> None:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.seconds)
        finally:
            self.running -= 1


class SlowReward(Slow, RewardManager):
    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        await self.work()
        return [Score(1.0) for _ in trajectories]


class SlowTool(Slow, Tool):
    name, description = "slow", "Waits."
    parameters = {"type": "object"}  # noqa: RUF012

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> ToolReply:
        await self.work()
        return ToolReply("waited")

    async def release(self, state: State, **kwargs: Any) -> None:
        self.released += 1


class SlowUser(Slow, Interaction):
    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        await self.work()
        return Reply([], done=True)


class SlowGame(Slow, Environment):
    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        return "begin"

    async def step(self, action: str, state: State) -> Observation:
        await self.work()
        return Observation("end", done=True)


class Bounded(ScriptedEngine):
    """Can hold three conversations."""

    capacity = 3  # type: ignore[assignment]
    closed: str | None = None

    def close(self) -> None:
        self.closed = threading.current_thread().name


def service(
    others: Participants | None = None,
    says: Callable[[Request, int], str] | None = None,
    seconds: float | None = 600.0,
    most: int | None = None,
) -> RolloutService:
    engine = Bounded(says or (lambda request, turn: call("slow") if turn == 0 else "done"))
    engine.bind(SimpleNamespace(tokenizer=TOKENIZER))  # type: ignore[arg-type]
    others = others or Participants()
    recipe = SimpleNamespace(
        engine=engine,
        sampled_fields={},
        rollout=SimpleNamespace(max_conversations=most, sampling_column=None),
        concurrency=1,
        conversation=ConversationLimits(seconds=seconds),
        tools=others.tools or None,
        interaction=others.interaction,
        environment=others.environment,
        agent=None,
        reward=None,
        train=SimpleNamespace(seed=0),
        parts=lambda: [engine],
    )
    template = ChatTemplate(TOKENIZER, {TOKENIZER.eos_token_id}, others.schemas())
    dialogue = SimpleNamespace(template=template, participants=others, context=4096)
    fabric = SimpleNamespace(world_size=1, device=torch.device("cpu"))
    ranks = SimpleNamespace(fabric=fabric, index=0, count=1, lead=True)
    return RolloutService(recipe, dialogue, None, ranks)  # type: ignore[arg-type]


def sampled(made: RolloutService, samples: int = 1) -> Coroutine[Any, Any, list[Trajectory]]:
    return collect(made.conversation_setup(Sampling(max_tokens=200), samples, 1), [(0, PROMPT)], ignore)


def participants(part: Slow) -> Participants:
    if isinstance(part, Tool):
        return Participants({"slow": part}, HermesParser())
    user, game = isinstance(part, Interaction) and part, isinstance(part, Environment) and part
    return Participants(interaction=user or None, environment=game or None)


def with_a_paused_trainer(made: RolloutService, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns, during which this thread stands still."""
    with closing(made):
        return made._loop.submit(work).result(SAFETY_SECONDS)


@pytest.mark.parametrize("hangs", [False, True])
@pytest.mark.parametrize("kind", [SlowTool, SlowUser, SlowGame])
def test_a_pause_of_the_trainer_costs_no_conversation(kind: type[Slow], hangs: bool) -> None:
    part = kind(hangs)
    made = service(participants(part))
    [done] = with_a_paused_trainer(made, sampled(made))
    if kind is SlowTool:
        assert (done.error, done.counts.get("tool_errors", 0)) == (None, int(hangs))
    else:
        late = f"ParticipantError: {kind.__name__} of tests: did not finish within 0.5 s"
        assert (done.error or "").startswith(late) if hangs else done.error is None


@pytest.mark.parametrize("hangs", [False, True])
def test_a_pause_of_the_trainer_loses_no_score(hangs: bool) -> None:
    made, reward = service(), SlowReward(hangs)
    work = run_concurrently(*(made.score(reward, [example_trajectory("a")] * 2) for _ in range(4)))
    groups = with_a_paused_trainer(made, work)
    error = "SlowReward of tests: did not finish within 0.5 s" if hangs else ""
    for score in (score for scores in groups for score in scores):
        assert score.reward == (None if hangs else 1.0)
        assert (score.error or "").partition(" (")[0] == error


def test_a_conversations_deadline_holds_during_a_pause() -> None:
    tool = SlowTool(hangs=True)
    tool.timeout = SAFETY_SECONDS
    made = service(participants(tool), seconds=TIMEOUT)
    [done] = with_a_paused_trainer(made, sampled(made))
    assert done.error == "the conversation took longer than 0.5 s"


@pytest.mark.usefixtures("virtual_clock")
def test_deadlines_count_from_admission_to_the_engine() -> None:
    """Nine of 0.15 s, three at once, take 0.45 s, within deadlines of 0.4 s; with more room all run at once."""
    for most, expected in ((None, 3), (2, 2), (9, 9)):
        tool = SlowTool()
        made = service(participants(tool), seconds=0.4, most=most)
        with closing(made):
            done = made.wait(sampled(made, samples=9))
        assert [t.error for t in done] == [None] * 9
        assert (tool.most, tool.released) == (expected, 9)


@pytest.mark.usefixtures("virtual_clock")
def test_waiting_for_a_tools_slot_counts_in_no_deadline() -> None:
    """Three calls of 0.15 s, one at a time: the last waits for 0.3 s, with conversations of 0.25 s."""
    tool = SlowTool()
    tool.concurrency = 1  # type: ignore[assignment]
    made = service(participants(tool), seconds=0.25)
    with closing(made):
        done = made.wait(sampled(made, samples=3))
    assert [(t.error, t.counts) for t in done] == [(None, {"tool_calls": 1})] * 3
    assert tool.most == 1


class Failing(Bounded):
    """Fails for good with the second request."""

    async def generate(self, request: Request) -> Completion:
        if request.key.sample == 1:
            await asyncio.sleep(0.05)
            raise EngineError("gone")
        return await super().generate(request)


def test_an_error_is_raised_by_itself_and_leaves_nothing_running() -> None:
    tool = SlowTool(hangs=True)
    made = service(participants(tool))
    made.engine.__class__ = Failing
    with pytest.raises(EngineError, match="^gone$"):
        made.wait(sampled(made, samples=3))
    assert (tool.running, tool.released) == (0, 3)
    made.close()


def test_closing_ends_work_and_the_engine_on_its_thread() -> None:
    before, tool = threading.enumerate(), SlowTool(hangs=True)
    made = service(participants(tool))
    future = made._loop.submit(sampled(made, samples=2))
    while tool.running < 2:
        time.sleep(0.01)
    made.close()
    assert future.done()
    assert (tool.running, tool.released) == (0, 2)
    assert made.engine.closed == "rlkit-rollouts"  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name == "rlkit-rollouts" and thread not in before]


def test_closing_waits_for_what_a_part_starts_to_close_itself() -> None:
    left: list[str] = []

    async def leave() -> None:
        await asyncio.sleep(0.05)
        left.append("left")

    made = service()
    tasks: list[asyncio.Task[None]] = []
    part = SimpleNamespace(close=lambda: tasks.append(asyncio.get_running_loop().create_task(leave())))
    made.recipe.parts = lambda: [part]  # type: ignore[method-assign]
    made.close()
    assert left == ["left"]


@pytest.mark.parametrize(
    ("cpus", "ranks", "asked", "workers"),
    [(16, 1, None, 4), (2, 1, None, 2), (9, 4, None, 2), (2, 8, None, 1), (None, 1, None, 1), (2, 1, 6, 6)],
)
def test_ranks_share_the_cpus_among_their_workers(
    cpus: int | None, ranks: int, asked: int | None, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, counts = service(), list[int]()
    made.close()
    monkeypatch.setattr(os, "cpu_count", lambda: cpus)
    monkeypatch.setattr(module, "SideGroup", lambda fabric: None)
    monkeypatch.setattr(module, "Workers", lambda count: counts.append(count) or Workers(count))
    made.recipe.concurrency = asked  # type: ignore[misc]
    made.ranks.fabric.world_size = ranks  # type: ignore[misc]
    RolloutService(made.recipe, made.dialogue, made.actor, made.ranks).close()
    assert counts == [workers]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_cancels_work_and_waits_for_its_end(loop: EventLoop) -> None:
    ended: list[str] = []

    async def work() -> None:
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            await asyncio.sleep(600)
        finally:
            await asyncio.sleep(0.1)
            ended.append("work")

    with pytest.raises(KeyboardInterrupt):
        loop.run(work())
    assert ended == ["work"]


async def within(seconds: float, work: float) -> str:
    """Return whether work that takes so long, in ten pieces, ends within its deadline."""
    try:
        async with deadline(seconds):
            for _ in range(10):
                await asyncio.sleep(work / 10)
    except TimeoutError:
        return "late"
    return "done"


@pytest.mark.parametrize("stopped", [False, True])
def test_time_in_which_the_loop_stands_still_moves_no_deadline(stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """For 1000 s a part blocks the loop, or the process is stopped while the loop waits.

    1 s of that counts: work of 0.5 s has 2 s, and what hangs ends all the same.
    """
    clock, stops, wait = [0.0], list[float](), selectors.DefaultSelector.select

    def select(selector: selectors.DefaultSelector, timeout: float | None = None) -> Any:
        if timeout is None:
            return wait(selector)
        clock[0] += timeout + sum(stops)
        stops.clear()
        return wait(selector, 0)

    async def stands_still() -> str:
        await asyncio.sleep(0.1)
        if stopped:
            stops.append(1000.0)
        else:
            clock[0] += 1000.0
        return "stood still"

    monkeypatch.setattr(selectors.DefaultSelector, "select", select)
    monkeypatch.setattr(loop_module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with closing(EventLoop(nothing)) as loop:
        work = run_concurrently(stands_still(), within(2.0, 0.5), within(2.0, 600.0), within(600.0, 0.5))
        assert loop.run(work) == ["stood still", "done", "late", "done"]
    assert 1000 < clock[0] < 1010


STOPPED = """
import asyncio, time
from rlkit.rollout import loop as module
module.STALL_SECONDS, module.TICK_SECONDS = 0.3, 0.05
from rlkit.rollout.loop import EventLoop
from rlkit.rollout.workers import Workers
from rlkit.base.tasks import run_concurrently
from rlkit.base.deadlines import deadline

def work_in_worker(seconds):
    time.sleep(seconds)
    return "worked"

{within}

loop, workers = EventLoop(lambda: None), Workers(1)
loop.run(workers.call(work_in_worker, 0.0, 60.0))
print("started", flush=True)
work = run_concurrently(within(1.5, 0.5), workers.call(work_in_worker, 0.5, 1.5), within(1.0, 600.0))
print(*loop.run(work), flush=True)
workers.close()
loop.close()
"""


@pytest.mark.stress
def test_a_process_that_was_stopped_has_lost_no_deadline() -> None:
    """Stopped for 2 s, of which 0.3 s count; work of 0.5 s has 1.5 s, and what hangs ends all the same."""
    command = (sys.executable, "-c", STOPPED.replace("{within}", inspect.getsource(within)))
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)
        process.send_signal(signal.SIGCONT)
        assert process.stdout.read() == "done worked late\n"
    assert process.returncode == 0


def test_another_event_loops_stop_does_not_stop_this_one(loop: EventLoop) -> None:
    async def leaves() -> None:
        raise SystemExit(3)

    async def answer() -> int:
        return 7

    with pytest.raises(SystemExit):
        loop.run(leaves())
    assert loop.run(answer()) == 7


def test_the_loop_does_not_wait_for_itself(loop: EventLoop) -> None:
    async def inner() -> None: ...

    async def outer() -> None:
        loop.run(inner())

    with pytest.raises(RuntimeError, match="cannot wait for work of its own; await it"):
        loop.run(outer())


def test_the_first_of_several_errors_is_raised() -> None:
    ended: list[int] = []

    async def work(number: int) -> int:
        try:
            await asyncio.sleep(number / 100)
            if number:
                raise RolloutError(f"number {number}")
            await asyncio.sleep(600)
        finally:
            ended.append(number)
        return number

    with pytest.raises(RolloutError, match="number 1"):
        asyncio.run(run_concurrently(work(0), work(1), work(2)))
    assert sorted(ended) == [0, 1, 2]


def test_background_tasks_end_with_an_error_of_their_block() -> None:
    async def forever(ended: list[str]) -> None:
        try:
            await asyncio.sleep(600)
        finally:
            ended.append("ended")

    async def fails() -> None:
        raise RolloutError("away")

    async def block(ended: list[str], waits: bool) -> None:
        async with Background() as background:
            background.start(forever(ended))
            await asyncio.sleep(0)
            assert background.running == 1
            if waits:
                background.start(fails())
                await background.wait()
            await fails()

    for waits in (False, True):
        ended: list[str] = []
        with pytest.raises(RolloutError, match="away"):
            asyncio.run(block(ended, waits))
        assert ended == ["ended"]
