"""Time limits of the checks of a plugin: one part that hangs does not keep the others from being checked."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_authors.limits import time_limit

from rlkit import hookimpl
from rlkit.cli.main import main
from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.interfaces.reward import RewardFunction, RewardManager
from rlkit.registry import load_plugins
from rlkit.testing import check_reward
from rlkit.types import Score, Trajectory


class SleepyReward(RewardFunction):
    """Sleeps, and returns a number whatever wakes it up."""

    timeout = 0.05

    def grade(self, trajectory: Trajectory) -> float:
        try:
            time.sleep(100)
        except BaseException:
            return 0.0
        return 1.0


class SleepyJudge(RewardManager):
    """Waits for a judge."""

    timeout = 0.05

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        await asyncio.sleep(100)
        return [Score(0.0) for _ in trajectories]


class SleepyParser(ToolParser):
    """Sleeps until the limit of its check, which it brings forward; it has no deadline of its own."""

    @classmethod
    def detects(cls, template: str) -> bool:
        return False

    def parse(self, text: str) -> ParsedTurn:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        time.sleep(100)
        return ParsedTurn(text)


class QuickReward(RewardFunction):
    """Works."""

    def grade(self, trajectory: Trajectory) -> float:
        return float(bool(trajectory.text))


class ExitingReward(RewardFunction):
    """Exits."""

    def grade(self, trajectory: Trajectory) -> float:
        raise SystemExit(3)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (SleepyReward(), "SleepyReward.grade did not finish within 0.05 s"),
        (SleepyJudge(), "SleepyJudge.score did not finish within 0.05 s"),
    ],
)
def test_a_reward_is_checked_within_its_timeout(reward: RewardManager, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_reward(reward)


def test_a_part_that_hangs_fails_only_its_own_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each part is named before its checks, so that whoever waits knows for what."""
    classes = (SleepyReward, ExitingReward, QuickReward, SleepyParser)

    def rlkit_register(register: Any) -> None:
        for cls in classes:
            register(cls)

    module = SimpleNamespace(__name__="slow", rlkit_register=hookimpl(rlkit_register))
    registry = load_plugins([("slow", module)], entry_points=False)
    monkeypatch.setattr("rlkit_authors.plugins.load_plugins", lambda: registry)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plugins", "test", "slow"]) == 1
    printed = capsys.readouterr()
    assert re.findall("^checking (.*)$", printed.err, re.M) == [cls.__name__ for cls in classes]
    results = dict(re.findall(r"^ ?(\w+) +│ contract +│ (.*?) *$", printed.out, re.M))
    assert results["QuickReward"].startswith("ok")
    assert "SleepyReward.grade did not finish within 0.05 s" in results["SleepyReward"]
    assert "SystemExit: 3" in results["ExitingReward"]
    assert "it did not finish within 60 s" in results["SleepyParser"]


def test_a_limit_within_a_limit_leaves_the_outer_one_running() -> None:
    before = signal.getsignal(signal.SIGALRM)

    def nest() -> None:
        with time_limit("inner", 60.0):
            pass
        time.sleep(60)

    with pytest.raises(AssertionError, match="outer did not finish within 0.1 s"), time_limit("outer", 0.1):
        nest()
    assert signal.getsignal(signal.SIGALRM) is before
