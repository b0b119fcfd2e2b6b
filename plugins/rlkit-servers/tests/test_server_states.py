"""The order in which an SGLang server takes weights; nothing here needs SGLang."""

from __future__ import annotations

import pytest
from rlkit_servers.sglang.launch import Launch, release
from rlkit_servers.states import (
    DEADLINES,
    PATH_FROM_LOADING,
    PATH_TO_LOADING,
    TRANSITIONS,
    ServerState,
    UpdateStep,
    needed_steps,
    state_after,
)

from rlkit.base.errors import EngineError
from rlkit.base.ranges import outside

AWAKE = [
    UpdateStep.PAUSE, UpdateStep.BEGIN, UpdateStep.LOAD, UpdateStep.LOAD, UpdateStep.END, UpdateStep.FLUSH,
    UpdateStep.LABEL, UpdateStep.CONTINUE, UpdateStep.CHECK,
]  # fmt: skip
RELEASED = [
    UpdateStep.PAUSE, UpdateStep.RELEASE, UpdateStep.RESUME_WEIGHTS, UpdateStep.BEGIN, UpdateStep.LOAD,
    UpdateStep.LOAD, UpdateStep.END, UpdateStep.RESUME_KV, UpdateStep.FLUSH, UpdateStep.LABEL, UpdateStep.CONTINUE,
    UpdateStep.CHECK,
]  # fmt: skip
ADAPTERS = [
    UpdateStep.PAUSE, UpdateStep.ADAPT, UpdateStep.FLUSH, UpdateStep.LABEL, UpdateStep.CONTINUE, UpdateStep.CHECK,
]  # fmt: skip
BOTH = [
    UpdateStep.PAUSE, UpdateStep.BEGIN, UpdateStep.LOAD, UpdateStep.END, UpdateStep.ADAPT, UpdateStep.FLUSH,
    UpdateStep.LABEL, UpdateStep.CONTINUE, UpdateStep.CHECK,
]  # fmt: skip


@pytest.mark.parametrize(
    ("state", "steps"),
    [
        (ServerState.COLD, AWAKE),
        (ServerState.COLD, BOTH),
        (ServerState.READY, ADAPTERS),
        (ServerState.READY, AWAKE),
        (ServerState.READY, RELEASED),
        (ServerState.UNCHECKED, AWAKE),
    ],
)
def test_a_sync_ends_ready(state: ServerState, steps: list[UpdateStep]) -> None:
    for step in steps:
        state = state_after(state, step)
    assert state is ServerState.READY


@pytest.mark.parametrize(
    ("state", "step"),
    [
        (ServerState.OFFLOADED, UpdateStep.FLUSH),  # the KV cache is not there
        (ServerState.LOADED_BARE, UpdateStep.FLUSH),
        (ServerState.OFFLOADED, UpdateStep.RESUME_KV),  # the weights come first
        (ServerState.PAUSED_BARE, UpdateStep.RESUME_KV),
        (ServerState.LOADING, UpdateStep.CONTINUE),  # with half of the weights
        (ServerState.LOADED, UpdateStep.CONTINUE),  # with prefixes of the old weights
        (ServerState.FLUSHED, UpdateStep.CONTINUE),  # under the old version
        (ServerState.LOADING, UpdateStep.BEGIN),  # twice
        (ServerState.LOADING, UpdateStep.ADAPT),  # with half of the base
        (ServerState.ADAPTED, UpdateStep.CONTINUE),  # with prefixes of the old adapters
        (ServerState.COLD, UpdateStep.LOAD),
        (ServerState.COLD, UpdateStep.CHECK),  # of what?
        (ServerState.LOADING, UpdateStep.RELEASE),
        (ServerState.READY, UpdateStep.RELEASE),  # SGLang crashes if it is not idle
        (ServerState.PAUSED, UpdateStep.RESUME_WEIGHTS),  # SGLang crashes if nothing was released
        (ServerState.BROKEN, UpdateStep.PAUSE),
    ],
)
def test_steps_out_of_order_are_refused(state: ServerState, step: UpdateStep) -> None:
    with pytest.raises(EngineError, match=f"a server in state '{state}' cannot {step}; legal steps: "):
        state_after(state, step)


def test_what_was_not_released_is_not_resumed() -> None:
    assert list(needed_steps(ServerState.READY, PATH_TO_LOADING)) == [UpdateStep.PAUSE, UpdateStep.BEGIN]
    assert list(needed_steps(ServerState.OFFLOADED, PATH_TO_LOADING)) == [UpdateStep.RESUME_WEIGHTS, UpdateStep.BEGIN]
    assert list(needed_steps(ServerState.LOADING, PATH_FROM_LOADING)) == [
        UpdateStep.END,
        UpdateStep.FLUSH,
        UpdateStep.LABEL,
        UpdateStep.CONTINUE,
    ]
    assert list(needed_steps(ServerState.LOADING_BARE, PATH_FROM_LOADING)) == [
        UpdateStep.END, UpdateStep.RESUME_KV, UpdateStep.FLUSH, UpdateStep.LABEL, UpdateStep.CONTINUE,
    ]  # fmt: skip


def test_every_state_leads_to_ready_within_a_deadline() -> None:
    assert set(TRANSITIONS) == set(ServerState)
    assert set(DEADLINES) == set(UpdateStep)
    for start in ServerState:
        reached, front = {start}, {start}
        while front:
            front = {then for state in front for then in TRANSITIONS[state].values()} - reached
            reached |= front
        assert ServerState.READY in reached


@pytest.mark.parametrize(("version", "numbers"), [("0.5.17", (0, 5, 17)), ("0.5.21.post1", (0, 5, 21))])
def test_known_releases(version: str, numbers: tuple[int, ...]) -> None:
    assert release(version) == numbers


@pytest.mark.parametrize("version", ["0.5.16", "0.5.24", "0.6.0", "None"])
def test_other_releases_are_refused(version: str) -> None:
    with pytest.raises(EngineError, match=r"works with 0\.5\.17 to 0\.5\.23; .*'\.\[sglang\]'"):
        release(version)


def test_options_are_checked() -> None:
    assert list(outside(Launch(tensor_parallel=0, memory_fraction=1.5), "launch")) == [
        "launch.tensor_parallel is 0, expected a whole number from 1 to 65536",
        "launch.memory_fraction is 1.5, expected a number above 0 and below 1",
    ]
