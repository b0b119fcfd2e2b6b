"""One server from the engine's side: its state, its requests, its restarts."""

from __future__ import annotations

import asyncio
import contextlib
import time
import warnings
from collections.abc import Awaitable, Callable, Iterator

from rlkit.base.errors import EngineError
from rlkit.interfaces.launcher import HostedServer
from rlkit.types import Request
from rlkit_servers.api import ServerApi, ServerOutput
from rlkit_servers.http import UNREADABLE, Fault
from rlkit_servers.retry import ServerRetryPolicy
from rlkit_servers.states import DEADLINES, ServerState, UpdateStep

POLL_SECONDS = 0.2
WATCH_SECONDS = 2.0
READY_SECONDS = 10.0
"""Time limit of a health check of a server that is waited for."""
TAIL_SECONDS = 2.0
"""Time limit of reading the log of a server that is restarted; its machine may be dead."""
NOTICE_SECONDS = 3.0
"""After which a wait for a server at a url is said, and why it takes."""


class Hung(Fault):
    """A server with requests in flight does not respond to health checks."""


class HealthWatch:
    """Checks a server's health as long as requests are in flight.

    Args:
        healthy: Returns whether the server is healthy.
        interval: Seconds between two checks.
    """

    def __init__(self, healthy: Callable[[], Awaitable[bool]], interval: float) -> None:
        self._healthy = healthy
        self._interval = interval
        self._requests = 0
        self._task: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[None] | None = None

    @contextlib.contextmanager
    def request(self) -> Iterator[asyncio.Future[None]]:
        """Watch the server during a request; yields a future that is done once the server is not healthy."""
        self._requests += 1
        if self._hung is None or self._task is None or self._task.done():
            self._hung = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._watch(self._hung))
        try:
            yield self._hung
        finally:
            self._requests -= 1

    def stop(self) -> None:
        """Stop watching; requests in flight count as hung."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(None)

    async def _watch(self, hung: asyncio.Future[None]) -> None:
        while self._requests:
            await asyncio.sleep(self._interval)
            if not await self._healthy() and not hung.done():
                hung.set_result(None)
                return


class InferenceServer:
    """A running server, or one that rlkit starts.

    Args:
        api: The server's calls.
        retry: How long to wait for the server, and how often it may fail.
        process: The server's process if rlkit starts it.
        owned: Whether this rank pushes weights to the server, rather than another rank.
    """

    def __init__(
        self, api: ServerApi, retry: ServerRetryPolicy, process: HostedServer | None = None, owned: bool = True
    ) -> None:
        self.api = api
        self.first_url = api.client.url
        """The address at the start of the run, by which ranks identify the server."""
        self.process = process
        self.owned = owned
        self.state = ServerState.COLD
        self.restoring = False
        """Whether it is brought back while other servers go on."""
        self.assigned = 0
        """Requests routed to the server, including those that still wait."""
        self.restarts = 0
        """Restarts since the last sync."""
        self.repairs = 0
        """Faults that have been checked."""
        self.trouble = ""
        """The last failure."""
        self.lock = asyncio.Lock()
        self._retry = retry
        self._inspected = False
        self._watch = HealthWatch(self._alive, min(WATCH_SECONDS, retry.hang_seconds / 4))

    @property
    def url(self) -> str:
        """The server's address."""
        return self.api.client.url

    @property
    def ended(self) -> bool:
        """Whether rlkit started the server's process and it is no longer running."""
        return self.process is not None and not self.process.alive

    def require_running(self) -> None:
        """Check that the server's process has not ended.

        Raises:
            Fault: It has.
        """
        if self.ended:
            raise Fault("its process ended")

    @property
    def lost(self) -> bool:
        """Whether the server has ended or has no weights, so that requests to it wait until it is restored."""
        return self.state in {ServerState.COLD, ServerState.BROKEN} or self.ended

    @contextlib.contextmanager
    def assign(self) -> Iterator[None]:
        """Count a request as this server's before it first waits, so that the next ones choose another server."""
        self.assigned += 1
        try:
            yield
        finally:
            self.assigned -= 1

    async def error(self, doing: str, fault: BaseException) -> EngineError:
        """Return an error that names what failed, with the server's own text and the end of its log."""
        text = f"{self.api.product} server {self.url} could not {doing}: {_reason(fault)}"
        if self.process is not None:
            tail = await asyncio.to_thread(self.process.tail)  # its machine may be dead, and the other servers go on
            text += f"\nThe end of its log {self.process.log}:\n{tail}"
        return EngineError(text)

    def mark_broken(self, doing: str, fault: BaseException) -> EngineError:
        """Record that the server's weights are unknown; return the error."""
        self.state = ServerState.BROKEN
        self.trouble = f"could not {doing}: {_reason(fault)}"
        return EngineError(f"{self.api.product} server {self.url} {self.trouble}")

    # life

    async def wait_ready(self) -> None:
        """Wait until the server is healthy, then inspect it; return at once if this was done before.

        Raises:
            EngineError: The server is not healthy in time, its process ends, or its release is not supported.
        """
        if self._inspected:
            return
        start, noticed = time.monotonic(), ""
        while (fault := await _problem(self.api, READY_SECONDS)) or self.ended:  # another one may answer in its place
            waited = time.monotonic() - start
            if self.ended:
                if self.process is None or not await asyncio.to_thread(self.process.is_lost):
                    raise await self.error("start", Fault("its process ended"))
                await _start_again(self.api, self.process)
                start = time.monotonic()
                continue
            if waited > self._retry.start_seconds:
                problem = f"there was no healthy answer within {self._retry.start_seconds:g} s; the last try: {fault}"
                raise await self.error("be reached" if self.process is None else "start", Fault(problem))
            if self.process is None and waited >= NOTICE_SECONDS and str(fault) != noticed:
                noticed = str(fault)
                warnings.warn(
                    f"waiting up to {self._retry.start_seconds:g} s for the {self.api.product} server {self.url}, "
                    f"which rlkit does not start: {noticed}; start it, or correct its url",
                    stacklevel=2,
                )
            await asyncio.sleep(POLL_SECONDS)
        try:
            await self.api.inspect(self.process is not None)
        except Fault as fault:
            raise await self.error("be inspected", fault) from fault
        self._inspected = True

    async def healthy(self, deadline: float) -> bool:
        """Check whether the server responds that it is healthy."""
        return not self.ended and await _problem(self.api, deadline) is None

    async def weight_version(self) -> str | None:
        """Return the label of the server's weights; None if it does not respond."""
        try:
            self.require_running()
            return await self.api.weight_version()
        except Fault:
            return None

    async def restart(self) -> None:
        """Make the server able to take weights again: restart it if rlkit started it, otherwise wait for it.

        Raises:
            EngineError: The server was restarted too often, or does not come back.
        """
        self._watch.stop()
        if self.restarts >= self._retry.restarts:
            fault = Fault(f"it failed {self.restarts + 1} times since the last sync: {self.trouble}")
            raise await self.error("go on", fault)
        self.restarts += 1
        remedy = "waiting for it" if self.process is None else f"restarting it{await self._last_line()}"
        warnings.warn(f"{self.api.product} server {self.url} {self.trouble}; {remedy}", stacklevel=2)
        self._inspected = False
        if self.process is None:
            await self._reset()
        else:
            await _start_again(self.api, self.process)
        await self.wait_ready()
        self.state = ServerState.COLD

    async def _last_line(self) -> str:
        """Return the server's last line of the log for a sentence; nothing if there is none that can be read."""
        assert self.process is not None
        lines: list[str] = []
        with contextlib.suppress(OSError):  # also TimeoutError, of a machine that does not answer
            tail = await asyncio.wait_for(asyncio.to_thread(self.process.tail), TAIL_SECONDS)
            lines = [line for line in tail.splitlines() if line and not line.startswith("[rlkit] the process ended")]
        return f". The last line of its log {self.process.log}: {lines[-1]}" if lines else ""

    async def _reset(self) -> None:
        """Close whatever a failed sync left open, once the server responds."""
        deadline = time.monotonic() + self._retry.start_seconds
        while await self.weight_version() is None:
            if time.monotonic() > deadline:
                raise await self.error("go on", Fault(f"it does not answer since: {self.trouble}"))
            await asyncio.sleep(POLL_SECONDS)
        try:
            await self.api.reset(DEADLINES[UpdateStep.RESET])
        except Fault as fault:
            raise await self.error(UpdateStep.RESET, fault) from fault

    def close(self) -> None:
        """Drop the connections, and kill the server if rlkit started it."""
        self._watch.stop()
        self.api.client.close()
        if self.process is not None:
            self.process.close()

    # requests

    async def ask(self, request: Request) -> ServerOutput:
        """Return the server's completion of a request.

        Raises:
            Fault: The request failed, or the server stopped responding to health checks.
        """
        self.require_running()
        with self._watch.request() as hung:
            call = asyncio.create_task(self.api.generate(request))
            try:
                await asyncio.wait((call, hung), return_when=asyncio.FIRST_COMPLETED)
                if not call.done():
                    raise Hung(f"{self.url} did not answer a health check within {self._retry.hang_seconds:g} s")
                return call.result()
            except UNREADABLE as error:
                raise Fault(f"{self.url} returned an invalid completion ({type(error).__name__}: {error})") from error
            finally:
                call.cancel()

    async def _alive(self) -> bool:
        """Check whether a server with requests is alive; one whose weights are updated is not asked."""
        return not self.ended and (self.lock.locked() or await self.healthy(self._retry.hang_seconds))


async def _start_again(api: ServerApi, process: HostedServer) -> None:
    """Start a server's process again, and send requests to its new address."""
    api.client.close()
    await asyncio.to_thread(process.start)
    api.client.move(process.url)


async def _problem(api: ServerApi, deadline: float) -> Fault | None:
    """Return the reason why a server is not healthy; None if it is."""
    try:
        await api.health(deadline)
    except Fault as fault:
        return fault
    return None


def _reason(fault: BaseException) -> str:
    return str(fault) or type(fault).__name__
