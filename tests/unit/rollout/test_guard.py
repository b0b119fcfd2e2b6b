"""The boundary around foreign code: its clock counts its own work, and what it does wrong costs one conversation."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
from rlkit_authors.runtime import ExampleRuntime

from rlkit.base.deadlines import deadline, paused, queued
from rlkit.base.errors import RolloutError
from rlkit.interactions import Retry
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.tool import State, ToolReply
from rlkit.rewards import Composite, Router
from rlkit.rollout.conversation import Limits
from rlkit.rollout.guard import GuardError, guard
from rlkit.rollout.participants import FAILED_CALLS, Participants
from rlkit.rollout.scoring import score
from rlkit.rollout.workers import Workers
from rlkit.testing import example_trajectory
from rlkit.types import Message, Prompt, Score, Trajectory
from tests.unit.hostile import Fragile, compare_badly, shout
from tests.unit.rollout.test_conversation import PROMPT, Adder, Countdown, call, hold, replies, tools
from tests.unit.simulation import run

T = TypeVar("T")


@dataclass
class Part:
    """Foreign code with a deadline."""

    timeout: float


async def never() -> None:
    await asyncio.sleep(600)


def test_the_guard_says_what_went_wrong() -> None:
    async def fails() -> None:
        raise TimeoutError("of a socket")

    async def refuses() -> None:
        raise RolloutError("the run's own")

    async def leaves() -> None:
        raise SystemExit(3)

    async def gives_up() -> None:
        raise asyncio.CancelledError("of its own")

    async def returns() -> int:
        return 5

    for work, message in (
        (never, r"did not finish within 0.05 s \(.*test_guard.py, line \d+: class Part:\)$"),
        (fails, r"TimeoutError: of a socket \(.*test_guard.py, line \d+: raise TimeoutError\(.of a socket.\)\)$"),
        (lambda: fails(1), "TypeError: .* takes 0 positional arguments but 1 was given \\("),  # type: ignore[call-arg]
        (lambda: 5, "TypeError: object int can't be used in 'await' expression"),
        (leaves, r"SystemExit: 3 \("),
        (gives_up, r"CancelledError: of its own \("),
        (returns, r"it returned 5, expected str \(.*test_guard.py, line \d+: class Part:\)$"),
    ):
        with pytest.raises(GuardError, match=f"^Part of tests: {message}"):
            run(guard(work, Part(0.05), str))  # type: ignore[arg-type]
    with pytest.raises(RolloutError, match="the run's own"):
        run(guard(refuses, Part(1.0)))


def test_a_cancelled_caller_of_the_guard_is_cancelled() -> None:
    async def caller() -> bool:
        task = asyncio.create_task(guard(never, Part(60.0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait((task,))
        return task.cancelled()

    assert run(caller())


def test_time_in_a_queue_counts_in_no_deadline() -> None:
    async def inside(stop: Callable[[], AbstractContextManager[None]]) -> str:
        with stop():
            await asyncio.sleep(0.3)
        return "done"

    async def around(stop: Callable[[], AbstractContextManager[None]]) -> str:
        async with deadline(0.2):
            return await guard(lambda: inside(stop), Part(0.2))

    assert run(around(queued)) == "done"
    with pytest.raises(TimeoutError):
        run(around(paused))


def test_the_clock_stands_still_while_anything_waits() -> None:
    async def waits(seconds: float) -> None:
        with paused():
            await asyncio.sleep(seconds)

    async def works(then: Callable[[], Awaitable[None]]) -> str:
        await asyncio.gather(waits(0.3), waits(0.1), guard(lambda: waits(0.3), Part(0.1)))
        await then()
        return "done"

    assert run(guard(lambda: works(lambda: asyncio.sleep(0)), Part(0.2))) == "done"
    with pytest.raises(GuardError, match="did not finish within 0.2 s"):
        run(guard(lambda: works(never), Part(0.2)))
    with pytest.raises(GuardError, match="did not finish within 0.2 s"):  # of the one inside, too
        run(guard(lambda: guard(lambda: works(never), Part(9.0)), Part(0.2)))


@pytest.fixture
def queue() -> Iterator[Workers]:
    """One worker, so that calls wait for one another."""
    pool = Workers(1)
    yield pool
    pool.close()


class ClockedLoop(asyncio.SelectorEventLoop):
    """Has a clock that a test sets."""

    now = 0.0

    def time(self) -> float:
        return self.now


def while_the_worker_is_busy(queue: Workers, fifo: Path, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns, which waits for the worker for 1000 s on the loop's clock."""
    os.mkfifo(fifo)
    loop = ClockedLoop()

    async def wait() -> T:
        first = asyncio.create_task(queue.call(Path.read_text, fifo, 60))
        first.add_done_callback(lambda _: os.close(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)))  # if it fails, too
        with await asyncio.to_thread(fifo.open, "w"):  # once the worker reads
            waiting = asyncio.create_task(work)
            for _ in range(100):
                await asyncio.sleep(0)
            loop.now += 1000
            await asyncio.sleep(0)
            assert not waiting.done()
        await first
        return await waiting

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(wait())


@pytest.mark.parametrize("combined", [Composite, Router])
def test_no_group_is_lost_in_the_queue_for_workers(
    queue: Workers, tmp_path: Path, combined: type[Composite] | type[Router]
) -> None:
    options: dict[str, Any] = {"default": "fine"} if combined is Router else {}
    reward = combined({"fine": Fragile()}, timeout=0.5, **options)
    reward.bind(SimpleNamespace(score=lambda r, t: score(r, t, queue)))  # type: ignore[arg-type]

    async def groups() -> list[list[Score]]:
        return await asyncio.gather(*(score(reward, [example_trajectory("fine")] * 2, queue) for _ in range(8)))

    scores = while_the_worker_is_busy(queue, tmp_path / "fifo", groups())
    assert [[found.reward for found in group] for group in scores] == [[1.0, 1.0]] * 8


def test_a_tool_and_a_user_who_wait_for_a_worker_lose_nothing(queue: Workers, tmp_path: Path) -> None:
    tool, user = shout(timeout=60.0), Retry()
    for part in (tool, user):
        part.bind(SimpleNamespace(work=queue.call))  # type: ignore[arg-type]

    async def both() -> tuple[object, object]:
        messages = [{"role": "assistant", "content": "It is 4."}]
        state = {"answer": "4", "left": 1}
        return await asyncio.gather(
            guard(lambda: tool.call({"text": "a"}, {}), Part(0.5)),
            guard(lambda: user.reply(messages, state), Part(0.5)),
        )

    found = while_the_worker_is_busy(queue, tmp_path / "fifo", both())
    assert found == [ToolReply("A"), Reply([], done=True)]


class Shapeless(RewardManager):
    """Returns what is no list of scores."""

    def __init__(self, value: object) -> None:
        self.value = value

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        return self.value  # type: ignore[return-value]


@pytest.mark.parametrize("value", [None, 5, [], [Score(1.0)] * 3])
def test_a_reward_that_returns_no_scores_fails_its_group_alone(queue: Workers, value: object) -> None:
    found = asyncio.run(score(Shapeless(value), [example_trajectory("a")] * 2, queue))
    assert [s.reward for s in found] == [None, None]
    assert all(
        (s.error and s.error.startswith("Shapeless of tests: ")) or "gave 'a'" in str(s.error) for s in found[:1]
    )


ROWS: dict[str, tuple[object, str | None]] = {
    "an unknown argument": ({"add": {"create": {"x": 1}}}, "unexpected keyword argument 'x'"),
    "a number for a phase": ({"add": {"create": 5}}, "the row's tools.add.create is 5, expected an object"),
    "a list for a tool": ({"add": [1]}, r"the row's tools.add.create is \[1\], expected an object"),
    "a name": ("add", None),
    "numbers as names": ({"add": {"create": {1: 2}}}, "keywords must be strings"),
    "null": ({"add": {"create": None, "call": None}}, None),
}


class Strict(Adder):
    """Takes no arguments of rows."""

    async def create(self, state: State) -> None:  # type: ignore[override]
        await super().create(state)


@pytest.mark.parametrize(("row", "error"), ROWS.values(), ids=ROWS)
def test_a_mistyped_argument_in_a_row_costs_one_conversation(row: object, error: str | None) -> None:
    prompt = Prompt("p", PROMPT.messages, "2", {"tools": row})
    [done] = hold(lambda request, turn: [call(a=1, b=1), "2"][turn], tools(add=Strict()), prompt)
    if error is None:
        assert done.error is None
    else:
        with pytest.raises(AssertionError, match=error):
            raise AssertionError(done.error)


def test_a_mistyped_argument_of_a_call_is_told_to_the_policy() -> None:
    class Narrow(Adder):
        async def call(self, arguments: dict[str, Any], state: State) -> str:  # type: ignore[override]
            return "never"

        async def release(self, state: State) -> None:  # type: ignore[override]
            raise AssertionError

    prompt = Prompt("p", PROMPT.messages, "2", {"tools": {"add": {"call": {"x": 1}, "release": {"x": 1}}}})
    [done] = hold(lambda request, turn: [call(a=1, b=1), "2"][turn], tools(add=Narrow()), prompt)
    assert "unexpected keyword argument 'x'" in replies(done)
    assert (done.error, done.counts) == (None, {"tool_calls": 1, "tool_errors": 1, "release_errors": 1})


def test_a_tool_whose_first_calls_all_fail_is_named_once() -> None:
    """The policy alone reads the errors of calls, so a mistake in a tool's code would cost a run unseen."""

    class Broken(Adder):
        async def call(self, arguments: dict[str, Any], state: State) -> str:  # type: ignore[override]
            raise KeyError("unit")

    participants, notes = tools(add=Broken()), list[str]()
    participants.note = notes.append
    hold(lambda request, turn: [call(a=1, b=1), "2"][turn], participants, samples=3 * FAILED_CALLS)
    [note] = notes
    assert re.match(r"warning: Broken.*: KeyError: 'unit' .*test_guard.py, line ", note)
    assert note.endswith(f", in each of {FAILED_CALLS} calls; counted as conversation/tool_errors")


def test_a_tool_that_has_answered_is_not_warned_of() -> None:
    participants, notes = tools(add=Adder()), list[str]()
    participants.note = notes.append
    turns = [call(a=1, b=1), *[call(a=13, b=0)] * (FAILED_CALLS + 1), "2"]
    limits = Limits(turns=len(turns), tool_calls=len(turns))
    [done] = hold(lambda request, turn: turns[turn], participants, limits=limits)
    assert done.counts["tool_errors"] == FAILED_CALLS + 1
    assert notes == []


def test_the_cause_of_a_failed_release_is_shown_once() -> None:
    participants, notes = tools(add=Adder()), list[str]()
    participants.note = notes.append
    prompt = Prompt("p", PROMPT.messages, "2", {"tools": {"add": {"release": {"fail": True}}}})
    hold(lambda request, turn: "2", participants, prompt, samples=3)
    [note] = notes
    assert note.startswith("warning: Adder")
    assert "will not go" in note


class Mumbler(Interaction):
    """Returns what is no reply."""

    def __init__(self, value: Any) -> None:
        self.value = value

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        return self.value  # type: ignore[no-any-return]


class Sync(Environment):
    """Forgot that its methods are coroutines."""

    def reset(self, prompt: Prompt, seed: int, state: State) -> str:  # type: ignore[override]
        return "begin"

    def step(self, action: str, state: State) -> Observation:  # type: ignore[override]
        return Observation("x")


class Numb(Countdown):
    """Returns what is no observation."""

    async def step(self, action: str, state: State) -> Observation:
        return 1.0  # type: ignore[return-value]


class Broken(ToolParser):
    """Raises."""

    def detects(self, template: str) -> bool:
        return False

    def parse(self, text: str) -> ParsedTurn:
        raise KeyError(text)


@pytest.mark.parametrize(
    ("participants", "error"),
    [
        (
            Participants(interaction=Mumbler(None)),
            "ParticipantError: Mumbler of .*: it returned None, expected Reply",
        ),
        (
            Participants(interaction=Mumbler(Reply(["hm"], done=False))),
            "Mumbler .*'hm'.*expected .* role and content",
        ),  # type: ignore[list-item]
        (
            Participants(interaction=Mumbler(Reply(None, done=False))),
            "Mumbler .*None.*expected .* role and content",
        ),  # type: ignore[arg-type]
        (Participants(environment=Sync()), "Sync of tests: TypeError: object str can't be used in 'await' expression"),
        (Participants(environment=Numb()), "Numb of tests: it returned 1.0, expected Observation"),
        (Participants({"add": Adder()}, Broken()), "ParticipantError: Broken of tests: KeyError: 'x'"),
    ],
)
def test_a_part_that_returns_nonsense_costs_its_conversation(participants: Participants, error: str) -> None:
    done = hold(lambda request, turn: "x", participants, samples=2)
    for trajectory in done:
        with pytest.raises(AssertionError, match=error):
            raise AssertionError(trajectory.error)


def test_retry_lets_the_policy_try_again_as_often_as_it_was_told() -> None:
    """With 2 tries, 3 answers may be wrong; a right one ends it."""
    for answers, rewards in ((["1", "2", "3"], [-0.5] * 3), (["1", "7"], [-0.5, 0.0]), (["7"], [0.0])):
        user = Retry(tries=2, penalty=0.5)

        async def work(function: Callable[[Any], Any], argument: Any, timeout: float) -> Any:
            return function(argument)

        user.bind(SimpleNamespace(work=work))  # type: ignore[arg-type]
        [done] = hold(lambda request, turn, said=answers: said[turn], Participants(interaction=user))
        assert done.turn_rewards == rewards


def test_an_incomparable_answer_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rlkit_math.retry._same", compare_badly)
    for reference, error in (("7", None), ("broken", "ParticipantError: Retry: RecursionError: ")):
        user = Retry(tries=0, penalty=0.5)
        user.bind(ExampleRuntime())
        prompt = Prompt("p", PROMPT.messages, reference)
        [done] = hold(lambda request, turn: "broken", Participants(interaction=user), prompt)
        assert (done.error or "").startswith(error or "")
        assert (done.error is None) == (error is None)
        assert done.turn_rewards == ([-0.5] if error is None else [0.0])
