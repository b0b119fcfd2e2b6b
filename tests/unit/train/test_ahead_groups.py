"""What a step that does not wait learns from: groups that a filter dropped, and groups that are trained on again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlkit.filters import ZeroSignal
from rlkit.train.ahead.buffer import ReplayBuffer
from rlkit.train.ahead.group import PromptGroup
from rlkit.train.ahead.ledger import Cut, Ledger
from rlkit.train.metrics import MAX_SOURCES, Meter, log_by_source
from rlkit.types import Prompt
from tests.unit.phases import LocalRanks
from tests.unit.train.test_step import trajectory

PROMPT = Prompt("a", [])


def group(place: int, oldest: int = 0, rewards: Sequence[float | None] = (0.0, 1.0)) -> PromptGroup:
    return PromptGroup(place, PROMPT, oldest, [trajectory(place, 1, reward) for reward in rewards])


def places(groups: Sequence[PromptGroup]) -> list[int]:
    return [one.position for one in groups]


def test_the_youngest_groups_are_reused_while_young_enough() -> None:
    """Two are kept; S = 2: what version 0 sampled is trained on again by versions 1 and 2, where reuse allows that."""
    buffer = ReplayBuffer(size=2, reuse=2, staleness=2)
    assert buffer.draw() == []
    buffer.add([group(0), group(1), group(2)], version=0)
    assert places(buffer.draw()) == [0, 1]  # of one age, those of the first places
    buffer.add([group(3, oldest=1)], version=1)
    assert [(one.position, one.again) for one in buffer.draw()] == [(3, 1), (0, 2)]
    buffer.add([], version=2)
    assert places(buffer.draw()) == [3]  # 0 was trained on twice more, and would be three steps old
    buffer.add([], version=3)
    assert buffer.draw() == []


def test_rows_without_reward_or_completions_are_not_reused() -> None:
    buffer = ReplayBuffer(size=4, reuse=1, staleness=2)
    buffer.add([group(0, rewards=(1.0, None)), group(1, rewards=()), group(2)], version=0)
    assert places(buffer.groups) == [0, 2]  # the scores of 0 were not known then
    assert places(buffer.draw()) == [2]


@given(st.data(), st.integers(0, 5), st.integers(1, 3), st.integers(0, 4))
def test_no_group_is_trained_on_too_often_or_too_old(data: Any, size: int, reuse: int, staleness: int) -> None:
    buffer = ReplayBuffer(size, reuse, staleness)
    often: dict[int, int] = {}
    for version in range(12):
        again = buffer.draw()
        assert len(again) <= size
        for one in again:
            often[one.position] += 1
            assert version - one.oldest <= staleness
        new = [group(3 * version + i, data.draw(st.integers(max(0, version - staleness), version))) for i in range(3)]
        often |= dict.fromkeys(places(new), 1)
        buffer.add(new, version)
    assert max(often.values()) <= 1 + reuse


@pytest.mark.parametrize(
    ("rewards", "passes", "verdicts"),
    [
        ((0.0, 1.0), True, [0.0]),
        ((1.0, 1.0), False, [1.0]),
        ((1.0, None), True, []),  # left out later, since a score failed
        ((), True, []),  # all conversations failed
    ],
)
def test_a_filter_sees_groups_whose_scores_are_all_known(
    rewards: Sequence[float | None], passes: bool, verdicts: list[float]
) -> None:
    one = group(0, rewards=rewards)
    assert asyncio.run(one.passes(ZeroSignal())) is passes
    assert [dropped for _, dropped in one.verdicts] == verdicts
    assert (len(one.trajectories), len(one.filtered)) == ((len(rewards), 0) if passes else (0, len(rewards)))


def test_the_age_of_a_group_is_that_of_its_oldest_token() -> None:
    one = group(0)
    one.trajectories[0].versions = [-1, 7, 8]
    one.trajectories[1].versions = [-1, 6, 9]
    assert one.oldest_token(9) == 6
    assert PromptGroup(0, PROMPT).oldest_token(9) == 9


def test_a_replacement_prompt_does_not_inherit_an_age() -> None:
    """S = 1, B = 1: group 0 began at version 0, and again at version 1, where another prompt took its place."""
    ledger = Ledger(batch=1, staleness=1, lead=1, total=9)
    assert ledger.admit(0) == [0, 1]
    ledger.end(1, 0)
    assert ledger.cut(0) == Cut([1], [])
    ledger.renew(0, 1)
    assert ledger.admit(1) == [2]
    ledger.end(2, 1)
    assert ledger.cut(1) == Cut([2], [])  # version 2 may train on what version 1 sampled


def test_metrics_are_shown_by_source_unless_there_are_too_many() -> None:
    found = [(Prompt("a", [], source="x"), 1.0), (Prompt("b", [], meta={"data_source": "y"}), 3.0), (PROMPT, 5.0)]
    meter = Meter()
    log_by_source(meter.mean, "age", found)
    log_by_source(meter.count, "dropped", found[:2])
    metrics = meter.result(LocalRanks())  # type: ignore[arg-type]
    assert metrics == {"age": 3, "age/x": 1, "age/y": 3, "dropped": 4, "dropped/x": 1, "dropped/y": 3}
    log_by_source(meter.count, "many", [(Prompt("a", [], source=str(n)), 1.0) for n in range(MAX_SOURCES + 1)])
    assert [name for name in meter.result(LocalRanks()) if "many" in name] == ["many"]  # type: ignore[arg-type]
