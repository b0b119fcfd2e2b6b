"""One server as the engine sees it: its state, its steps, its requests in flight, its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from rlkit.engines.server.api import Answer, ServerApi
from rlkit.engines.server.http import UNREADABLE, Fault
from rlkit.engines.server.process import ServerProcess
from rlkit.engines.server.retry import ServerRetryPolicy
from rlkit.engines.server.states import (
    DEADLINES,
    PATH_FROM_LOADING,
    PATH_TO_LOADING,
    PATH_WITH_ADAPTERS,
    State,
    Step,
    after,
    walk,
)
from rlkit.engines.server.transports import Adapter, Parcel, Transport
from rlkit.errors import EngineError
from rlkit.types import Request

T = TypeVar("T")
POLL_SECONDS = 0.2
WATCH_SECONDS = 2.0


class Hung(Fault):
    """A server with requests in flight does not answer whether it is well."""


class Node:
    """A server: a running one, or one that rlkit starts.

    Args:
        api: Its calls.
        retry: How long it is waited for.
        process: The process, where rlkit starts it.
        owned: Whether this rank pushes weights to it; another rank does otherwise.
    """

    def __init__(
        self, api: ServerApi, retry: ServerRetryPolicy, process: ServerProcess | None = None, owned: bool = True
    ) -> None:
        self.api = api
        self.process = process
        self.owned = owned
        self.state = State.COLD
        self.in_flight = 0
        self.assigned = 0
        """Requests routed to it, those that still wait among them."""
        self.restarts = 0
        self.repairs = 0
        self.trouble = ""
        self.lock = asyncio.Lock()
        self._retry = retry
        self._inspected = False
        self._watch: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return self.api.client.url

    @property
    def ended(self) -> bool:
        """Whether it is rlkit's process, and runs no more."""
        return self.process is not None and not self.process.alive

    @property
    def lost(self) -> bool:
        """Whether it has no weights or has ended: requests to it wait until it is restored."""
        return self.state in {State.COLD, State.BROKEN} or self.ended

    @contextlib.contextmanager
    def assign(self) -> Iterator[None]:
        """Count a request as this server's, from before the first wait, so that others choose another one."""
        self.assigned += 1
        try:
            yield
        finally:
            self.assigned -= 1

    def error(self, doing: str, fault: BaseException) -> EngineError:
        """Return an error with what failed, the server's own text and the end of its log."""
        text = f"{self.api.product} server {self.url} could not {doing}: {_reason(fault)}"
        if self.process is not None:
            text += f"\nThe end of its log {self.process.log}:\n{self.process.tail()}"
        return EngineError(text)

    def broken(self, doing: str, fault: BaseException) -> EngineError:
        """Note that its weights are unknown; return the error."""
        self.state = State.BROKEN
        self.trouble = f"could not {doing}: {_reason(fault)}"
        return self.error(doing, fault)

    # life

    async def wait_ready(self) -> None:
        """Wait until it is healthy, and inspect it; do nothing if that was done before.

        Raises:
            EngineError: It is not healthy in time, its process ends, or its release is not supported.
        """
        if self._inspected:
            return
        deadline = time.monotonic() + self._retry.start_seconds
        while not await self.healthy(10.0):
            if self.ended:
                raise self.error("start", Fault("its process ended"))
            if time.monotonic() > deadline:
                fault = Fault(f"there was no healthy answer within {self._retry.start_seconds:g} s")
                raise self.error("start", fault)
            await asyncio.sleep(POLL_SECONDS)
        try:
            await self.api.inspect(self.process is not None)
        except Fault as fault:
            raise self.error("be inspected", fault) from fault
        self._inspected = True

    async def healthy(self, deadline: float) -> bool:
        """Whether it answers that it is well."""
        try:
            await self.api.health(deadline)
        except Fault:
            return False
        return True

    async def weight_version(self) -> str | None:
        """Return the label that its weights have; None if it does not answer."""
        try:
            return await self.api.weight_version()
        except Fault:
            return None

    async def restart(self) -> None:
        """Bring it back to where it can take weights: restart it if it is rlkit's, wait for it otherwise.

        Raises:
            EngineError: It was restarted too often, or does not come back.
        """
        self._end_watch()
        if self.restarts >= self._retry.restarts:
            raise self.error("go on", Fault(f"it failed {self.restarts + 1} times since the last sync: {self.trouble}"))
        self.restarts += 1
        what = "waiting for it" if self.process is None else "restarting it"
        warnings.warn(f"{self.api.product} server {self.url} {self.trouble}; {what}", stacklevel=2)
        self._inspected = False
        if self.process is None:
            await self._reset()
        else:
            self.api.client.close()
            await asyncio.to_thread(self.process.start)
        await self.wait_ready()
        self.state = State.COLD

    async def _reset(self) -> None:
        """Leave whatever a failed sync left open, once there is an answer at all."""
        deadline = time.monotonic() + self._retry.start_seconds
        while await self.weight_version() is None:
            if time.monotonic() > deadline:
                raise self.error("go on", Fault(f"it does not answer since: {self.trouble}"))
            await asyncio.sleep(POLL_SECONDS)
        try:
            await self.api.reset(DEADLINES[Step.RESET])
        except Fault as fault:
            raise self.error(Step.RESET, fault) from fault

    def close(self) -> None:
        """Drop the connections and end the server, if it is rlkit's."""
        self._end_watch()
        self.api.client.close()
        if self.process is not None:
            self.process.close()

    # weights

    async def perform(self, step: Step, call: Callable[[], Awaitable[T]]) -> T:
        """Run a step within its deadline; a failure leaves the server broken.

        Raises:
            EngineError: The step is out of order, or failed.
        """
        then, seconds = after(self.state, step), DEADLINES[step]
        try:
            found = await asyncio.wait_for(call(), seconds)
        except (TimeoutError, Fault) as error:
            fault = error if isinstance(error, Fault) else Fault(f"there was no answer within {seconds:g} s")
            raise self.broken(step, fault) from error
        self.state = then
        return found

    async def prepare(self, transport: Transport[Parcel], base: bool) -> None:
        """Run all steps before the first bucket, if there are any."""
        for step in walk(self.state, PATH_TO_LOADING if base else (Step.PAUSE,)):
            await self.perform(step, lambda step=step: self._step(step, transport))  # type: ignore[misc]

    async def load(self, transport: Transport[Parcel], parcel: Parcel) -> None:
        """Load a bucket."""
        await self.perform(Step.LOAD, lambda: transport.load(self.api, parcel))

    async def finish(self, transport: Transport[Parcel], label: str, adapter: Adapter | None) -> None:
        """Run all steps after the last bucket, except the weight check."""
        for step in walk(self.state, PATH_FROM_LOADING if adapter is None else PATH_WITH_ADAPTERS):
            await self.perform(step, lambda step=step: self._step(step, transport, label, adapter))  # type: ignore[misc]

    async def _step(
        self, step: Step, transport: Transport[Parcel], label: str = "", adapter: Adapter | None = None
    ) -> None:
        if step is Step.END:
            await transport.finish(self.api)
        if step is Step.ADAPT and adapter is not None:
            await transport.adapt(self.api, adapter)
        else:
            await self.api.perform(step, label, transport.brackets)

    def release(self) -> None:
        """Release its memory, if it holds checked weights; they are lost. Called outside of any event loop."""
        if self.state is not State.READY:
            return
        then = after(after(self.state, Step.PAUSE), Step.RELEASE)
        try:
            self.api.release(DEADLINES[Step.RELEASE])
        except Fault as fault:
            raise self.broken(Step.RELEASE, fault) from fault
        self.state = then

    # requests

    async def ask(self, request: Request) -> Answer:
        """Return the answer to a request.

        Raises:
            Fault: There was none; also if the server stopped answering health checks meanwhile.
        """
        self.in_flight += 1
        if self._watch is None or self._watch.done():
            self._hung = asyncio.get_running_loop().create_future()
            self._watch = asyncio.create_task(self._keep_watch(self._hung))
        assert self._hung is not None
        call = asyncio.create_task(self.api.generate(request))
        hung = self._hung
        try:
            await asyncio.wait((call, hung), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Hung(f"{self.url} did not answer a health check within {self._retry.hang_seconds:g} s")
            return call.result()
        except UNREADABLE as error:
            raise Fault(f"{self.url} answered what is no completion ({type(error).__name__}: {error})") from error
        finally:
            call.cancel()
            self.in_flight -= 1

    async def _keep_watch(self, hung: asyncio.Future[None]) -> None:
        """While requests are in flight, look whether the server lives."""
        while self.in_flight:
            await asyncio.sleep(min(WATCH_SECONDS, self._retry.hang_seconds / 4))
            well = not self.ended and (self.lock.locked() or await self.healthy(self._retry.hang_seconds))
            if not well and not hung.done():
                hung.set_result(None)
                return

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(None)


def _reason(fault: BaseException) -> str:
    return str(fault) or type(fault).__name__
