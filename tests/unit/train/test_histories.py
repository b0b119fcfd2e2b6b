"""Random histories of a run whose rollouts run ahead: none breaks a rule, whatever fails and wherever it is resumed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from rlkit.base.errors import EngineError, RolloutError
from rlkit.recipe import GroupReplay
from rlkit.train.ahead.stream import TrainedGroups
from rlkit.train.metrics import Meter
from tests.unit.simulation import Data, Engine, Plan, Service, open_stream, simulate

PROBABILITY = st.sampled_from([0.0, 0.1, 0.4])
PLANS = st.builds(
    Plan,
    beside=st.booleans(),
    batch=st.integers(1, 4),
    group_size=st.integers(1, 3),
    staleness=st.integers(0, 3),
    lead=st.sampled_from([None, 0.0, 0.5, 1.0]),
    steps=st.integers(1, 5),
    turns=st.integers(1, 3),
    mean=st.integers(1, 6),
    failing=PROBABILITY,
    dying=PROBABILITY,
    grading=st.sampled_from([0.0, 0.0, 0.1]),
    dropping=st.sampled_from([None, 0.3, 1.0]),
    refills=st.integers(0, 2),
    replay=st.sampled_from([None, GroupReplay(1, 1), GroupReplay(3, 2)]),
    interrupted=PROBABILITY,
    resuming=PROBABILITY,
    saving=st.sampled_from([1.0, 0.5]),
    token_seconds=st.sampled_from([0.1, 0.5]),
    user_seconds=st.sampled_from([0.0, 1.0, 8.0]),
    step_seconds=st.sampled_from([0.0, 1.0, 20.0]),
    seed=st.integers(0, 2**32),
    pace=st.integers(0, 2**32),
)


OLD = Plan(
    beside=True, batch=2, group_size=1, staleness=1, lead=1.0, steps=6, turns=1, mean=6, dropping=0.3, refills=2,
    token_seconds=0.5, step_seconds=20.0, seed=28, pace=28,
)  # fmt: skip
"""A prompt takes the place of another while the engine has not taken the weights of the step before, and is slow."""


@settings(max_examples=40, deadline=None)
@given(PLANS)
@example(OLD)
def test_no_history_breaks_the_rules(plan: Plan) -> None:
    simulate(plan)


def test_a_fatal_reward_ends_the_run_for_a_stale_group_too() -> None:
    """Its scoring fails while it is cancelled; that was lost, and the run went on."""
    times = {"token_seconds": 0.1, "user_seconds": 1.0, "step_seconds": 0.0}
    chances = {"failing": 0.0, "dying": 0.0, "grading": 0.1, "interrupted": 0.0, "resuming": 0.0, "saving": 0.5}
    size = {"beside": True, "batch": 4, "group_size": 1, "staleness": 2, "lead": 1.0, "steps": 5, "turns": 2, "mean": 5}
    others = {"dropping": None, "refills": 0, "replay": None, "seed": 438262, "pace": 33554432}
    simulate(Plan(**size, **chances, **times, **others))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@settings(max_examples=1000, deadline=None)
@given(plan=PLANS)
def test_none_of_two_thousand_histories_breaks_the_rules(part: int, plan: Plan) -> None:
    simulate(plan)


@settings(max_examples=30, deadline=None)
@given(PLANS, st.integers(0, 2**32))
def test_how_fast_tools_and_steps_are_changes_nothing(plan: Plan, pace: int) -> None:
    """Which groups a step trains on and which weights sampled each token follow from the seed."""
    plan = replace(
        plan, beside=False, dying=0.0, grading=0.0, interrupted=0.0, user_seconds=min(plan.user_seconds, 1.0)
    )
    assert simulate(plan) == simulate(replace(plan, pace=pace))


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(("token_seconds", "hangs"), [(1801.0, True), (1799.0, False)])
def test_a_hanging_engine_ends_the_run_and_a_slow_one_does_not(beside: bool, token_seconds: float, hangs: bool) -> None:
    """No answer comes for longer than train.deadline, 1800 s; turns have one token here."""
    plan = Plan(
        beside, batch=2, group_size=2, lead=1.0, mean=1, turns=1, token_seconds=token_seconds, step_seconds=9999
    )
    service = Service(plan, 0)
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups())
    if hangs:
        with pytest.raises(RolloutError) as error:
            stream(stream._data, service, 1, Meter())
        assert str(error.value) == (
            "rollouts made no progress for 1800 s (train.deadline): the trainer waits, with 0 of 2 groups of the next "
            "step; 8 requests are in Engine, and 0 conversations wait for something else, such as a tool; find out "
            "what hangs, or raise train.deadline if completions take as long"
        )
        assert service.clock.loop.time() == 1800
    else:
        assert len(stream(stream._data, service, 1, Meter()).all) == 4
    service.close()


@pytest.mark.parametrize("beside", [False, True])
def test_a_reply_is_progress_as_well(beside: bool) -> None:
    """Tokens at 1000 and 3700 s, after which a user takes 1700 s: never 1800 s, train.deadline, without progress."""
    plan = Plan(beside, batch=1, group_size=1, mean=1, turns=2, token_seconds=1000, user_seconds=1700)
    service = Service(plan, 0)
    user, service.recipe.conversation.seconds = service.recipe.interaction, None  # type: ignore[union-attr]
    user.timeout, user.pace = 2000.0, SimpleNamespace(random=lambda: 1.0)  # type: ignore[union-attr]
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups())
    [trajectory] = stream(stream._data, service, 1, Meter()).all
    assert (trajectory.error, sum(trajectory.mask), service.clock.loop.time()) == (None, 2, 5400)
    service.close()


@pytest.mark.parametrize("beside", [False, True])
def test_an_error_ends_the_step_at_once(beside: bool) -> None:
    """The engine dies at its second token, while the group of another prompt would have gone on for long."""
    plan = Plan(beside, batch=2, mean=1000, turns=1)
    service = Service(plan, 0)
    service.engine.fails_after = 1  # type: ignore[attr-defined]
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups())
    with pytest.raises(EngineError, match="the engine died"):
        stream(stream._data, service, 1, Meter())
    assert service.clock.loop.time() == pytest.approx(0.2)
    service.close()


@pytest.mark.parametrize(
    ("beside", "capacity", "begun"),
    [(False, None, 8), (False, 1000, 8), (False, 15, 5), (False, 4, 4), (True, None, 4), (True, 1000, 4)],
)
def test_without_a_lead_as_many_groups_begin_as_the_engine_holds(
    beside: bool, capacity: int | None, begun: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S = 3, steps of 2 groups of 3: two steps' groups at least, which is also what begins beside the trainer."""
    monkeypatch.setattr(Engine, "capacity", capacity)
    plan = Plan(beside, batch=2, group_size=3, staleness=3, steps=9)
    service = Service(plan, 0)
    data = Data(plan, service)
    stream = open_stream(plan, service, data, TrainedGroups())  # type: ignore[arg-type]
    stream(data, service, 1, Meter())  # type: ignore[arg-type]
    assert len(data.begun) == begun
    service.close()


def test_a_run_may_go_on_with_smaller_steps() -> None:
    """Four of a step's prompts were trained on, not the first four; three steps of three follow."""
    plan = Plan(batch=3, group_size=1, steps=4)
    service = Service(plan, 0)
    service.version = 1
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups(1, (2, 4, 6)))
    places = []
    for number in (2, 3, 4):
        rollouts = stream(stream._data, service, number, Meter())
        places += [int(t.prompt.id) for t in rollouts.all]
        service.version += 1
    assert sorted(places) == [1, 3, 5, 7, 8, 9, 10, 11, 12]
    assert stream.trained == TrainedGroups(13)
    service.close()


@pytest.mark.parametrize("beside", [False, True])
def test_a_rank_for_which_another_one_samples_samples_nothing(beside: bool) -> None:
    """The ranks of a tensor-parallel group train on what the first of them samples."""
    plan = Plan(beside, lead=1.0, replay=GroupReplay(2))
    service = Service(plan, 0)
    service.ranks.lead = False  # type: ignore[misc]
    data = Data(plan, service)
    stream = open_stream(plan, service, data, TrainedGroups())
    assert stream(data, service, 1, Meter()).all == []  # type: ignore[arg-type]
    assert (data.begun, service.engine.rows) == (set(), [])  # type: ignore[attr-defined]
    service.close()


def test_a_reused_group_is_trained_on_beside_new_ones() -> None:
    """Steps of one prompt, S = 2, two groups at most once more each: their numbers follow the step's own."""
    plan = Plan(batch=1, group_size=2, staleness=2, lead=0.0, turns=1, steps=4, replay=GroupReplay(2, 2))
    service = Service(plan, 0)
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups())
    steps, metrics = [], []
    for number in (1, 2, 3):
        meter = Meter()
        rollouts = stream(stream._data, service, number, meter)
        service.wait(rollouts.scoring.wait())
        steps.append([(t.group, t.prompt.id, t.credit.get("again", 0)) for t in rollouts.sampled[::2]])
        metrics.append(meter.result(service.ranks))
        service.version += 1
        service.sync_weights()
    assert steps == [
        [(0, "0", 0)],
        [(0, "1", 0), (1, "0", 1)],
        [(0, "2", 0), (1, "1", 1), (2, "0", 2)],
    ]
    assert [row["replay/groups"] for row in metrics] == [0, 1, 2]
    assert [row["staleness/dropped"] for row in metrics] == [0, 0, 0]
    assert [row["staleness/max"] for row in metrics] == [0, 1, 2]
    assert [row["replay/kept"] for row in metrics] == [1, 2, 2]  # 0 would be too old for a fourth step
    stream.close()
    service.close()


def test_a_step_begins_once_its_groups_are_complete(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two prompts the first is answered with one token and the second with four: a token takes 0.1 s."""

    def ends(plan: Plan, *of: object) -> float:
        return 0.0 if of in {("1/0/0/0", 1), ("2/0/1/0", 4)} else 1.0

    monkeypatch.setattr(Plan, "chance", ends)
    plan = Plan(batch=1, group_size=1, staleness=1, lead=1.0, turns=1, steps=2)
    service = Service(plan, 0)
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups())
    versions, seconds = [], []
    for number in (1, 2):
        [trajectory] = stream(stream._data, service, number, Meter()).all
        versions.append(trajectory.versions)
        seconds.append(service.clock.loop.time())
        service.version += 1
        service.sync_weights()
    assert versions == [[-1, 0], [-1, 0, 1, 1, 1]]
    assert seconds == pytest.approx([0.1, 0.4])
    stream.close()
    service.close()


def test_closing_a_stream_cancels_its_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first prompt is answered with one token, the other goes on."""
    monkeypatch.setattr(Plan, "chance", lambda plan, *of: float(of != ("1/0/0/0", 1)))
    plan = Plan(batch=1, group_size=1, staleness=1, lead=1.0, turns=1, steps=2)
    service = Service(plan, 0)
    stream = open_stream(plan, service, Data(plan, service), TrainedGroups())
    service.wait(stream(stream._data, service, 1, Meter()).scoring.wait())
    assert asyncio.all_tasks(service.clock.loop)
    stream.close()
    assert not asyncio.all_tasks(service.clock.loop)
    service.close()
