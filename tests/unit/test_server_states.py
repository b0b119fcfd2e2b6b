"""The order in which an SGLang server takes weights; nothing here needs SGLang."""

from __future__ import annotations

import pytest

from rlkit.engines.server.states import DEADLINES, PATH_FROM_LOADING, PATH_TO_LOADING, TABLE, State, Step, after, walk
from rlkit.engines.sglang.launch import Launch, release
from rlkit.errors import EngineError
from rlkit.ranges import outside

AWAKE = [
    Step.PAUSE, Step.BEGIN, Step.LOAD, Step.LOAD, Step.END, Step.FLUSH, Step.LABEL, Step.CONTINUE, Step.CHECK,
]  # fmt: skip
RELEASED = [
    Step.PAUSE, Step.RELEASE, Step.RESUME_WEIGHTS, Step.BEGIN, Step.LOAD, Step.LOAD, Step.END, Step.RESUME_KV,
    Step.FLUSH, Step.LABEL, Step.CONTINUE, Step.CHECK,
]  # fmt: skip
ADAPTERS = [Step.PAUSE, Step.ADAPT, Step.FLUSH, Step.LABEL, Step.CONTINUE, Step.CHECK]
BOTH = [
    Step.PAUSE, Step.BEGIN, Step.LOAD, Step.END, Step.ADAPT, Step.FLUSH, Step.LABEL, Step.CONTINUE, Step.CHECK,
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        (State.COLD, AWAKE),
        (State.COLD, BOTH),
        (State.READY, ADAPTERS),
        (State.READY, AWAKE),
        (State.READY, RELEASED),
        (State.UNCHECKED, AWAKE),
    ],
)
def test_a_sync_ends_ready(state: State, steps: list[Step]) -> None:
    for step in steps:
        state = after(state, step)
    assert state is State.READY


@pytest.mark.parametrize(
    ("state", "step"),
    [
        (State.OFFLOADED, Step.FLUSH),  # the KV cache is not there
        (State.LOADED_BARE, Step.FLUSH),
        (State.OFFLOADED, Step.RESUME_KV),  # the weights come first
        (State.PAUSED_BARE, Step.RESUME_KV),
        (State.LOADING, Step.CONTINUE),  # with half of the weights
        (State.LOADED, Step.CONTINUE),  # with prefixes of the old weights
        (State.FLUSHED, Step.CONTINUE),  # under the old version
        (State.LOADING, Step.BEGIN),  # twice
        (State.LOADING, Step.ADAPT),  # with half of the base
        (State.ADAPTED, Step.CONTINUE),  # with prefixes of the old adapters
        (State.COLD, Step.LOAD),
        (State.COLD, Step.CHECK),  # of what?
        (State.LOADING, Step.RELEASE),
        (State.READY, Step.RELEASE),  # SGLang crashes if it is not idle
        (State.PAUSED, Step.RESUME_WEIGHTS),  # SGLang crashes if nothing was released
        (State.BROKEN, Step.PAUSE),
    ],
)
def test_steps_out_of_order_are_refused(state: State, step: Step) -> None:
    with pytest.raises(EngineError, match=f"a server in state '{state}' cannot {step}; legal steps: "):
        after(state, step)


def test_what_was_not_released_is_not_resumed() -> None:
    assert list(walk(State.READY, PATH_TO_LOADING)) == [Step.PAUSE, Step.BEGIN]
    assert list(walk(State.OFFLOADED, PATH_TO_LOADING)) == [Step.RESUME_WEIGHTS, Step.BEGIN]
    assert list(walk(State.LOADING, PATH_FROM_LOADING)) == [Step.END, Step.FLUSH, Step.LABEL, Step.CONTINUE]
    assert list(walk(State.LOADING_BARE, PATH_FROM_LOADING)) == [
        Step.END, Step.RESUME_KV, Step.FLUSH, Step.LABEL, Step.CONTINUE,
    ]  # fmt: skip


def test_every_state_leads_to_ready_and_every_step_has_a_deadline() -> None:
    assert set(TABLE) == set(State)
    assert set(DEADLINES) == set(Step)
    for start in State:
        reached, front = {start}, {start}
        while front:
            front = {then for state in front for then in TABLE[state].values()} - reached
            reached |= front
        assert State.READY in reached


@pytest.mark.parametrize(("version", "numbers"), [("0.5.17", (0, 5, 17)), ("0.5.21.post1", (0, 5, 21))])
def test_known_releases(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "None"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match=r"works with 0\.5\.17 to 0\.5\.23; .* pip install 'rlkit-fabric\[sglang\]'"):
        release(version)


def test_options_are_checked() -> None:
    assert list(outside(Launch(tensor_parallel=0, memory_fraction=1.5), "launch")) == [
        "launch.tensor_parallel is 0, expected a whole number from 1 to 65536",
        "launch.memory_fraction is 1.5, expected a number above 0 and below 1",
    ]
