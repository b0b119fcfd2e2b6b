"""The steps by which a server takes new weights, or releases them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rlkit_servers.http import Fault
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import (
    DEADLINES,
    PATH_FROM_LOADING,
    PATH_TO_LOADING,
    PATH_WITH_ADAPTERS,
    ServerState,
    UpdateStep,
    needed_steps,
    state_after,
)
from rlkit_servers.transports import Adapter, Parcel, Transport

T = TypeVar("T")


async def perform(server: InferenceServer, step: UpdateStep, call: Callable[[], Awaitable[T]]) -> T:
    """Run a step within its deadline; a failure leaves the server broken.

    A server whose process has ended is sent nothing: another one may listen at its address.

    Raises:
        EngineError: The step is out of order, or failed.
    """
    next_state = state_after(server.state, step)
    seconds = DEADLINES[step]
    try:
        server.require_running()
        result = await asyncio.wait_for(call(), seconds)
    except (TimeoutError, Fault) as error:
        fault = error if isinstance(error, Fault) else Fault(f"there was no answer within {seconds:g} s")
        raise server.mark_broken(step, fault) from error
    server.state = next_state
    return result


async def prepare(server: InferenceServer, transport: Transport[Parcel], base: bool) -> None:
    """Run the steps before the first bucket of the `base`, or before the adapters alone."""
    for step in needed_steps(server.state, PATH_TO_LOADING if base else (UpdateStep.PAUSE,)):
        await _run(server, step, transport)


async def load(server: InferenceServer, transport: Transport[Parcel], parcel: Parcel) -> None:
    """Load a bucket."""
    await perform(server, UpdateStep.LOAD, lambda: transport.load(server.api, parcel))


async def finish(server: InferenceServer, transport: Transport[Parcel], label: str, adapter: Adapter | None) -> None:
    """Run the steps after the last bucket, except the weight check."""
    for step in needed_steps(server.state, PATH_FROM_LOADING if adapter is None else PATH_WITH_ADAPTERS):
        await _run(server, step, transport, label, adapter)


def release(server: InferenceServer) -> None:
    """Release a server's memory, and with it its weights, if these are checked ones.

    Called outside of any event loop.

    Raises:
        EngineError: The server did not release it; it is broken.
    """
    if server.state is not ServerState.READY:
        return
    next_state = state_after(state_after(server.state, UpdateStep.PAUSE), UpdateStep.RELEASE)
    try:
        server.api.release(DEADLINES[UpdateStep.RELEASE])
    except Fault as fault:
        server.mark_broken(UpdateStep.RELEASE, fault)
        raise asyncio.run(server.error(UpdateStep.RELEASE, fault)) from fault
    server.state = next_state


async def _run(
    server: InferenceServer,
    step: UpdateStep,
    transport: Transport[Parcel],
    label: str = "",
    adapter: Adapter | None = None,
) -> None:
    async def call() -> None:
        if step is UpdateStep.END:
            await transport.finish(server.api)
        if step is UpdateStep.ADAPT and adapter is not None:
            await transport.adapt(server.api, adapter)
        else:
            await server.api.perform(step, label, transport.brackets)

    await perform(server, step, call)
