"""A trainer that pauses for 5 s while conversations and scores are in progress, whose parts have timeouts of 3 s."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rlkit import commands, hookimpl
from rlkit.cli.main import main
from rlkit.interfaces.callback import Callback, RolloutsEnd
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.reward import RewardFunction, RewardManager
from rlkit.interfaces.tool import State, ToolReply
from rlkit.registry import load_plugins
from rlkit.tools import Calculator
from rlkit.types import Message, Score, Trajectory
from tests.conftest import read_jsonl

pytestmark = [pytest.mark.slow, pytest.mark.stress]

PAUSE, TIMEOUT, WORK = 5.0, 3.0, 1.5
SAMPLES = 8


class Pauses:
    """Stops the main thread from a signal's handler, at the first call of a part; notes when calls end."""

    started: ClassVar[list[float]] = []
    ended: ClassVar[list[float]] = []

    @classmethod
    def start(cls) -> None:
        if not cls.started:
            cls.started.append(time.monotonic())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

    @classmethod
    async def work(cls) -> None:
        await asyncio.sleep(WORK)
        cls.ended.append(time.monotonic())

    @classmethod
    def within(cls) -> int:
        """Return how many calls ended during the pause."""
        [start] = cls.started
        return sum(start <= end < start + PAUSE for end in cls.ended)


class SlowCalculator(Calculator):
    timeout = TIMEOUT

    async def call(self, arguments: dict[str, object], state: State, **kwargs: object) -> ToolReply:
        Pauses.start()
        await Pauses.work()
        return await super().call(arguments, state, **kwargs)


class SlowUser(Interaction):
    timeout = TIMEOUT

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        Pauses.start()
        await Pauses.work()
        return Reply([], done=True)


class SlowReward(RewardManager):
    timeout = TIMEOUT

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        await Pauses.work()
        return [Score(float(len(t.text))) for t in trajectories]


class SlowGrade(RewardFunction):
    timeout = TIMEOUT
    concurrency = 2

    def grade(self, trajectory: Trajectory) -> float:
        time.sleep(WORK)
        return float(len(trajectory.text))


class PauseWhileScored(Callback):
    """Pauses while the scores of what was sampled are in progress."""

    budgets: ClassVar[dict[str, float]] = {"on_rollouts": 60.0}

    def on_rollouts(self, event: RolloutsEnd) -> None:
        Pauses.started.append(time.monotonic())
        time.sleep(PAUSE)


@pytest.fixture(autouse=True)
def plugin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    parts = (SlowCalculator, SlowUser, SlowReward, SlowGrade, PauseWhileScored)
    made = SimpleNamespace(__name__="tests", rlkit_register=hookimpl(lambda register: [register(p) for p in parts]))
    monkeypatch.setattr(commands, "load_plugins", lambda: load_plugins([("pauses", made)], entry_points=False))
    before = signal.signal(signal.SIGALRM, lambda *_: time.sleep(PAUSE))
    Pauses.started.clear()
    Pauses.ended.clear()
    yield
    signal.signal(signal.SIGALRM, before)


def fit(out: Path, *options: str) -> dict[str, float]:
    """Return the metrics of a run of one step."""
    few = (
        "--validation=null", "--train.steps=1", "--train.prompts_per_step=4", "--rollout.group_size=2",
        "--rollout.sampling.max_tokens=24",
    )  # fmt: skip
    assert main(["fit", *few, *options, f"--out={out}"]) == 0
    [metrics] = read_jsonl(out / "metrics.jsonl")
    return metrics


@pytest.mark.parametrize("options", [
    ("--recipe=quick_tool", "--tools.calculator=SlowCalculator", "--rollout.sampling.max_tokens=72"),
    ("--recipe=quickstart", "--interaction=SlowUser", "--conversation.turns=2"),
], ids=["tool", "user"])  # fmt: skip
def test_a_pause_during_conversations_loses_none(tmp_path: Path, options: tuple[str, ...]) -> None:
    metrics = fit(tmp_path / "out", *options, "--train.require_reward=false")
    assert Pauses.within() > 0
    lost = [metrics.get(name, 0) for name in ("rollout/failed", "reward/failed", "conversation/tool_errors")]
    assert (metrics["rollout/samples"], lost) == (SAMPLES, [0, 0, 0])


def test_a_pause_during_scores_loses_none(tmp_path: Path) -> None:
    metrics = fit(
        tmp_path / "out", "--recipe=quickstart", "--reward=SlowReward", "--callbacks=[PauseWhileScored]",
        "--train.require_reward=false",
    )  # fmt: skip
    assert Pauses.within() == 4
    assert (metrics["rollout/samples"], metrics["reward/failed"]) == (SAMPLES, 0)


def test_a_pause_while_workers_score_loses_none(tmp_path: Path) -> None:
    """Eight scores of 1.5 s with two workers take 6 s: some wait for a worker longer than their timeout."""
    metrics = fit(
        tmp_path / "out", "--recipe=quickstart", "--reward=SlowGrade", "--callbacks=[PauseWhileScored]",
        "--train.require_reward=false",
    )  # fmt: skip
    assert (metrics["rollout/samples"], metrics["reward/failed"]) == (SAMPLES, 0)
