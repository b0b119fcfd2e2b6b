"""Sampling a step: refills of dropped groups, greedy answers, and what is trained on, without an engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from rlkit.base.errors import PartError
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.filter import GroupFilter
from rlkit.train import sampling as module
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts
from rlkit.train.sampling import sample
from rlkit.types import Prompt, Trajectory
from tests.unit.phases import LocalRanks
from tests.unit.train.test_step import metrics, trajectory


class Spread(GroupFilter):
    """Keeps groups whose rewards differ."""

    def keep(self, group: Sequence[Trajectory]) -> bool:
        return len({t.reward for t in group}) > 1


def group(number: int, *rewards: float | None, error: str | None = None) -> list[Trajectory]:
    found = [trajectory(number, 1, reward) for reward in rewards]
    return found + ([] if error is None else [trajectory(number, error=error)])


class Played:
    """Stands for the conversations of a step: what each attempt samples, by the group; notes what was asked."""

    def __init__(self, *attempts: list[Trajectory], refills: int = 3, keeps: GroupFilter | None = None) -> None:
        self.attempts = attempts
        self.asked: list[tuple[int, int]] = []
        self.prompts: list[list[tuple[int, str]]] = []
        chosen = keeps
        if chosen is not None:
            chosen.max_refills = refills
        recipe = SimpleNamespace(rollout=SimpleNamespace(filter=chosen, oversample=1), needs=Needs.NOTHING)
        self.data: Any = SimpleNamespace(
            prompts=lambda step: [(0, Prompt("a", [])), (1, Prompt("b", []))], spare=self.spare
        )
        self.service: Any = SimpleNamespace(
            recipe=recipe, ranks=LocalRanks(), sample=asyncio.run, shard_for_rank=lambda items: items
        )

    def spare(self, step: int, attempt: int, number: int) -> Prompt:
        return Prompt(f"spare {step}/{attempt}/{number}", [])

    async def play(self, service: Any, prompts: Any, when: tuple[int, int], *_: Any, quota: Any) -> Any:
        self.asked.append(when)
        self.prompts.append([(number, prompt.id) for number, prompt in prompts])
        return self.attempts[when[1]]

    def run(self, patch: pytest.MonkeyPatch) -> tuple[Rollouts, dict[str, float]]:
        patch.setattr(module, "_sample_prompts", self.play)
        meter = Meter()
        return sample(self.data, self.service, 5, meter), metrics(meter)


def test_without_a_filter_all_that_did_not_fail_is_trained_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [*group(0, 1.0, 1.0), *group(1, None, error="broke")]
    played = Played(found, found)
    rollouts, logged = played.run(monkeypatch)
    assert rollouts.all == found
    assert rollouts.sampled == rollouts.train_on == found[:3]
    assert rollouts.dispatch == [[0, 1, 2]]
    assert rollouts.greedy is None
    assert played.asked == [(5, 0)]
    assert logged == {}
    played.service.recipe.needs = Needs.GREEDY | Needs.GROUPS
    assert played.run(monkeypatch)[0].greedy == {}


def test_dropped_groups_are_replaced_until_none_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [*group(0, 1.0, 0.0), *group(1, 1.0, 1.0)]
    second, third = group(1, 0.0, 0.0), group(1, 1.0, 0.0)
    played = Played(first, second, third, keeps=Spread())
    rollouts, logged = played.run(monkeypatch)
    assert played.prompts == [[(0, "a"), (1, "b")], [(1, "spare 5/0/1")], [(1, "spare 5/1/1")]]
    assert rollouts.all == [*first, *second, *third]
    assert rollouts.train_on == [*first[:2], *third]
    assert logged == {"filter/refilled": 2, "filter/dropped": 2 / 4}


def test_refills_end_and_groups_that_failed_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Group 0 has a reward that failed, and group 1 only answers that are alike."""
    first = [*group(0, 1.0, None), *group(1, 1.0, 1.0)]
    played = Played(first, group(1, 0.0, 0.0), keeps=Spread(), refills=1)
    rollouts, logged = played.run(monkeypatch)
    assert played.asked == [(5, 0), (5, 1)]
    assert rollouts.train_on == []
    assert logged == {"filter/refilled": 1, "filter/dropped": 1}
    unlimited = Played(group(0, 1.0, 1.0), keeps=Spread(), refills=0)
    _, logged = unlimited.run(monkeypatch)
    assert (unlimited.asked, logged) == ([(5, 0)], {"filter/dropped": 1})


def test_a_filter_that_answers_something_else_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Vague(Spread):
        seen: ClassVar[list[int]] = []

        def keep(self, group: Sequence[Trajectory]) -> bool:
            self.seen.append(len(group))
            return None  # type: ignore[return-value]

    with pytest.raises(PartError, match="Vague.*`keep` returned None for a group, expected True or False"):
        Played([*group(0, 1.0, 0.0, error="broke")], keeps=Vague()).run(monkeypatch)
    assert Vague.seen == [2]  # without the conversation that failed


def test_running_scores_are_awaited_before_the_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    late = group(0, None, None)
    played = Played(late, keeps=Spread(), refills=0)

    async def play(service: Any, prompts: Any, when: Any, rollouts: Rollouts, *_: Any, **__: Any) -> list[Trajectory]:
        async def score() -> None:
            await asyncio.sleep(0.01)
            for number, one in enumerate(late):
                one.score = trajectory(0, 1, float(number)).score

        rollouts.scoring.start(score())
        return late

    played.play = play  # type: ignore[method-assign]
    rollouts, _ = played.run(monkeypatch)
    assert rollouts.train_on == late
    assert rollouts.scoring.running == 0
