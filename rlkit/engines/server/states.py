"""The order in which a server takes new weights: a table, and nothing that does I/O.

Seen to go wrong in other trainers: flushing while the KV cache is released, sampling from weights whose memory was
released and never written again, forgetting to end an update. A step that the table does not allow is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

from rlkit.errors import EngineError


class State(StrEnum):
    """The state of a server as the trainer tracks it. In the `bare` ones the KV cache's memory is released."""

    COLD = "cold"  # it answers, with weights that are not the trainer's
    READY = "ready"  # it serves the trainer's weights, and they were checked
    OFFLOADED = "offloaded"  # paused, the memory of weights and KV cache released with their contents
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


class Step(StrEnum):
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


TABLE: dict[State, dict[Step, State]] = {
    State.COLD: {Step.PAUSE: State.PAUSED},
    State.READY: {Step.PAUSE: State.PAUSED},
    State.OFFLOADED: {Step.RESUME_WEIGHTS: State.PAUSED_BARE},
    State.PAUSED_BARE: {Step.BEGIN: State.LOADING_BARE},
    State.LOADING_BARE: {Step.LOAD: State.LOADING_BARE, Step.END: State.LOADED_BARE},
    State.LOADED_BARE: {Step.RESUME_KV: State.LOADED},
    State.PAUSED: {Step.BEGIN: State.LOADING, Step.ADAPT: State.ADAPTED, Step.RELEASE: State.OFFLOADED},
    State.LOADING: {Step.LOAD: State.LOADING, Step.END: State.LOADED},
    State.LOADED: {Step.ADAPT: State.ADAPTED, Step.FLUSH: State.FLUSHED},
    State.ADAPTED: {Step.FLUSH: State.FLUSHED},
    State.FLUSHED: {Step.LABEL: State.LABELLED},
    State.LABELLED: {Step.CONTINUE: State.UNCHECKED},
    State.UNCHECKED: {Step.PAUSE: State.PAUSED, Step.CHECK: State.READY},
    State.BROKEN: {Step.RESET: State.COLD},
}

DEADLINES: dict[Step, float] = {
    Step.RELEASE: 60.0,
    Step.PAUSE: 60.0,
    Step.RESUME_WEIGHTS: 60.0,
    Step.BEGIN: 120.0,
    Step.LOAD: 600.0,
    Step.END: 600.0,
    Step.RESUME_KV: 60.0,
    Step.ADAPT: 600.0,
    Step.FLUSH: 60.0,
    Step.LABEL: 60.0,
    Step.CONTINUE: 60.0,
    Step.CHECK: 300.0,
    Step.RESET: 60.0,
}
"""Seconds that a step may take."""

PATH_TO_LOADING = (Step.PAUSE, Step.RESUME_WEIGHTS, Step.BEGIN)
PATH_FROM_LOADING = (Step.END, Step.RESUME_KV, Step.FLUSH, Step.LABEL, Step.CONTINUE)
PATH_WITH_ADAPTERS = (Step.END, Step.RESUME_KV, Step.ADAPT, Step.FLUSH, Step.LABEL, Step.CONTINUE)


def after(state: State, step: Step) -> State:
    """Return the state in which a step leaves a server.

    Raises:
        EngineError: The step may not be made in this state.
    """
    allowed = TABLE[state]
    if step not in allowed:
        legal = ", ".join(repr(str(s)) for s in allowed) or "none"
        raise EngineError(f"a server in state {str(state)!r} cannot {step}; legal steps: {legal}")
    return allowed[step]


def walk(state: State, path: tuple[Step, ...]) -> Iterator[Step]:
    """Return the steps of a path that a server in this state needs.

    Memory that was not released is not resumed, an offloaded server is not paused, and an update that was not begun is
    not ended.
    """
    for step in path:
        optional = step in {Step.RESUME_WEIGHTS, Step.RESUME_KV}
        optional |= (step, state) in {(Step.PAUSE, State.OFFLOADED), (Step.END, State.PAUSED)}
        if optional and step not in TABLE[state]:
            continue
        state = after(state, step)
        yield step
