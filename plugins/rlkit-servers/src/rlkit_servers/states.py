"""The order in which a server takes new weights: a table of states, without any I/O.

Other trainers have had these bugs: flushing a KV cache that is released, sampling from weights that were released and
never written again, not ending an update. A step that the table does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from rlkit.base.errors import EngineError


class ServerState(StrEnum):
    """The state of a server as the trainer tracks it; in the `bare` states the KV cache's memory is released."""

    COLD = "cold"  # it responds, with weights that are not the trainer's
    READY = "ready"  # it serves the trainer's weights, and has passed the check
    OFFLOADED = "offloaded"  # paused; weights and KV cache are released, and their contents lost
    PAUSED_BARE = "paused, bare"
    LOADING_BARE = "loading, bare"
    LOADED_BARE = "loaded, bare"
    PAUSED = "paused"
    LOADING = "loading"
    LOADED = "loaded"
    ADAPTED = "adapted"
    FLUSHED = "flushed"
    LABELLED = "labelled"
    UNCHECKED = "unchecked"
    BROKEN = "broken"  # a step failed: its weights are unknown


class UpdateStep(StrEnum):
    """A step of a weight update."""

    RELEASE = "release memory"
    PAUSE = "pause"
    RESUME_WEIGHTS = "resume the weights' memory"
    BEGIN = "begin the update"
    LOAD = "load a bucket"
    END = "end the update"
    RESUME_KV = "resume the KV cache's memory"
    ADAPT = "load the adapters"
    FLUSH = "flush the KV cache"
    LABEL = "set the version"
    CONTINUE = "continue"
    CHECK = "check the weights"
    RESET = "reset"


TRANSITIONS: dict[ServerState, dict[UpdateStep, ServerState]] = {
    ServerState.COLD: {UpdateStep.PAUSE: ServerState.PAUSED},
    ServerState.READY: {UpdateStep.PAUSE: ServerState.PAUSED},
    ServerState.OFFLOADED: {UpdateStep.RESUME_WEIGHTS: ServerState.PAUSED_BARE},
    ServerState.PAUSED_BARE: {UpdateStep.BEGIN: ServerState.LOADING_BARE},
    ServerState.LOADING_BARE: {UpdateStep.LOAD: ServerState.LOADING_BARE, UpdateStep.END: ServerState.LOADED_BARE},
    ServerState.LOADED_BARE: {UpdateStep.RESUME_KV: ServerState.LOADED},
    ServerState.PAUSED: {
        UpdateStep.BEGIN: ServerState.LOADING,
        UpdateStep.ADAPT: ServerState.ADAPTED,
        UpdateStep.RELEASE: ServerState.OFFLOADED,
    },
    ServerState.LOADING: {UpdateStep.LOAD: ServerState.LOADING, UpdateStep.END: ServerState.LOADED},
    ServerState.LOADED: {UpdateStep.ADAPT: ServerState.ADAPTED, UpdateStep.FLUSH: ServerState.FLUSHED},
    ServerState.ADAPTED: {UpdateStep.FLUSH: ServerState.FLUSHED},
    ServerState.FLUSHED: {UpdateStep.LABEL: ServerState.LABELLED},
    ServerState.LABELLED: {UpdateStep.CONTINUE: ServerState.UNCHECKED},
    ServerState.UNCHECKED: {UpdateStep.PAUSE: ServerState.PAUSED, UpdateStep.CHECK: ServerState.READY},
    ServerState.BROKEN: {UpdateStep.RESET: ServerState.COLD},
}

DEADLINES = dict.fromkeys(UpdateStep, 60.0) | {
    UpdateStep.BEGIN: 120.0,
    UpdateStep.CHECK: 300.0,
    **dict.fromkeys((UpdateStep.LOAD, UpdateStep.END, UpdateStep.ADAPT), 600.0),
}
"""The time limit of each step, in seconds."""

PATH_TO_LOADING = (UpdateStep.PAUSE, UpdateStep.RESUME_WEIGHTS, UpdateStep.BEGIN)
LOADED, SERVED = (UpdateStep.END, UpdateStep.RESUME_KV), (UpdateStep.FLUSH, UpdateStep.LABEL, UpdateStep.CONTINUE)
PATH_FROM_LOADING = (*LOADED, *SERVED)
PATH_WITH_ADAPTERS = (*LOADED, UpdateStep.ADAPT, *SERVED)


def state_after(state: ServerState, step: UpdateStep) -> ServerState:
    """Return the state of a server after a step.

    Raises:
        EngineError: The step is not allowed in this state.
    """
    allowed = TRANSITIONS[state]
    if step not in allowed:
        legal = ", ".join(repr(str(s)) for s in allowed) or "none"
        raise EngineError(f"a server in state {str(state)!r} cannot {step}; legal steps: {legal}")
    return allowed[step]


def needed_steps(state: ServerState, path: tuple[UpdateStep, ...]) -> Iterator[UpdateStep]:
    """Yield the steps of a path that a server in this state needs.

    Memory that is not released is not resumed, an offloaded server is not paused, and an update that was not begun is
    not ended.
    """
    for step in path:
        optional = step in {UpdateStep.RESUME_WEIGHTS, UpdateStep.RESUME_KV}
        optional |= step is UpdateStep.PAUSE and state is ServerState.OFFLOADED
        optional |= step is UpdateStep.END and state is ServerState.PAUSED
        if optional and step not in TRANSITIONS[state]:
            continue
        state = state_after(state, step)
        yield step
