"""One SGLang server as the engine sees it: its state, its steps, its requests in flight, its end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlkit.engines.server.http import Client, Fault
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
from rlkit.engines.server.transports import Adapter, Transport
from rlkit.engines.sglang.process import BRACKETS_SINCE, ServerProcess, release
from rlkit.errors import EngineError
from rlkit.ranges import Repeats, Seconds

MEMORY = ("weights", "kv_cache")
POLL_SECONDS = 0.2
WATCH_SECONDS = 2.0


@dataclass(frozen=True)
class RetryPolicy:
    """How long servers are waited for, and how often they may fail.

    Args:
        request_seconds: For one request, retries included, unless it states its own deadline.
        start_seconds: Until a server that was started answers.
        hang_seconds: Without a sign of life, after which a server that has work counts as dead.
        retries: Further attempts of a request, with growing pauses.
        restarts: Of each server between two syncs, before the run ends.
    """

    request_seconds: Seconds = 1800.0
    start_seconds: Seconds = 600.0
    hang_seconds: Seconds = 60.0
    retries: Repeats = 5
    restarts: Repeats = 3


class Hung(Fault):
    """A server that had requests in flight gave no sign of life."""


class Node:
    """A server: somebody else's at `url`, or one that rlkit starts.

    Args:
        url: Its address.
        retry: How long it is waited for.
        process: The process, where rlkit starts it.
        owned: Whether this rank gives it weights; another rank does otherwise.
    """

    def __init__(self, url: str, retry: RetryPolicy, process: ServerProcess | None = None, owned: bool = True) -> None:
        self.client = Client(url)
        self.process = process
        self.owned = owned
        self.state = State.COLD
        self.tp = 1
        self.in_flight = 0
        self.assigned = 0
        """Requests that it is to answer, those that wait until it can among them."""
        self.restarts = 0
        self.mended = 0
        self.adapter: str | None = None
        """The name of the adapters that its answers are to be sampled with."""
        self.trouble = ""
        self.lock = asyncio.Lock()
        self._retry = retry
        self._met = False
        self._brackets = True
        self._watch: asyncio.Task[None] | None = None
        self._hung: asyncio.Future[None] | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return self.client.url

    @property
    def lost(self) -> bool:
        """Whether it is known to have no weights or to be gone: who asks it waits until it is back."""
        return self.state in {State.COLD, State.BROKEN} or (self.process is not None and not self.process.alive)

    @contextlib.contextmanager
    def assign(self) -> Iterator[None]:
        """Count a request as this server's, from before the first wait, so that others choose another one."""
        self.assigned += 1
        try:
            yield
        finally:
            self.assigned -= 1

    def error(self, doing: str, fault: BaseException) -> EngineError:
        """Return an error with what was being done, the server's words and the end of its log."""
        text = f"SGLang server {self.url} could not {doing}: {fault}"
        if self.process is not None:
            text += f"\nThe end of its log {self.process.log}:\n{self.process.tail()}"
        return EngineError(text)

    def broken(self, doing: str, fault: BaseException) -> EngineError:
        """Note that nobody knows any more which weights it holds; give the error."""
        self.state = State.BROKEN
        self.trouble = f"could not {doing}: {fault}"
        return self.error(doing, fault)

    # life

    async def wait_ready(self) -> None:
        """Wait until it answers, and learn what it is; does nothing if that is known.

        Raises:
            EngineError: It does not come up in time, ends, or is of a release that rlkit does not know.
        """
        if self._met:
            return
        deadline = time.monotonic() + self._retry.start_seconds
        while not await self.healthy(10.0):
            if self.process is not None and not self.process.alive:
                raise self.error("start", Fault("its process ended"))
            if time.monotonic() > deadline:
                fault = Fault(f"there was no healthy answer within {self._retry.start_seconds:g} s")
                raise self.error("start", fault)
            await asyncio.sleep(POLL_SECONDS)
        try:
            info = await self.client.get("/server_info", 30.0)
        except Fault as fault:
            raise self.error("say what it is", fault) from fault
        if self.process is not None:
            with contextlib.suppress(Fault):
                await self.client.post("/freeze_gc", {}, 30.0)  # or it walks all that it has imported at every flush
        self.tp = int(info.get("tp_size") or 1)
        self._brackets = release(str(info.get("version"))) >= BRACKETS_SINCE
        self._met = True

    async def healthy(self, deadline: float) -> bool:
        """Whether it answers that it is well."""
        try:
            await self.client.get("/health", deadline)
        except Fault:
            return False
        return True

    async def weight_version(self) -> str | None:
        """Return the version that it says its weights have; None if it does not answer."""
        try:
            info = await self.client.get("/model_info", 10.0)
        except Fault:
            return None
        return str(info.get("weight_version"))

    async def restart(self) -> None:
        """Bring it back to where it can take weights: restart it if it is rlkit's, wait for it otherwise.

        Raises:
            EngineError: It was restarted too often, or does not come back.
        """
        self._end_watch()
        if self.restarts >= self._retry.restarts:
            raise self.error("go on", Fault(f"it failed {self.restarts + 1} times since the last sync: {self.trouble}"))
        self.restarts += 1
        self._met = False
        if self.process is None:
            await self._reset()
        else:
            self.client.close()
            await asyncio.to_thread(self.process.start)
        await self.wait_ready()
        self.state = State.COLD

    async def _reset(self) -> None:
        """Leave whatever a failed sync left open, once there is an answer at all.

        A server that has nothing open says so, which is no failure.
        """
        deadline = time.monotonic() + self._retry.start_seconds
        while await self.weight_version() is None:
            if time.monotonic() > deadline:
                raise self.error("go on", Fault(f"it does not answer since: {self.trouble}"))
            await asyncio.sleep(POLL_SECONDS)
        for path in ("/end_weight_update", "/continue_generation"):
            try:
                await self.client.post(path, {}, DEADLINES[Step.RESET])
            except Fault as fault:
                if fault.status is None:
                    raise self.error(Step.RESET, fault) from fault

    def close(self) -> None:
        """Drop the connections and end the server, if it is rlkit's."""
        self._end_watch()
        self.client.close()
        if self.process is not None:
            self.process.close()

    # weights

    async def perform(self, step: Step, call: Callable[[], Awaitable[Any]]) -> Any:
        """Make a step within its deadline; a failure leaves the server broken.

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

    async def prepare(self, transport: Transport, base: bool) -> None:
        """Make all steps up to the first bucket, if there will be any."""
        for step in walk(self.state, PATH_TO_LOADING if base else (Step.PAUSE,)):
            await self.perform(step, lambda step=step: self._simple(step, transport))  # type: ignore[misc]

    async def load(self, transport: Transport, parcel: Any) -> None:
        """Take a bucket."""
        await self.perform(Step.LOAD, lambda: transport.load(self.client, self.tp, parcel))

    async def finish(self, transport: Transport, label: str, adapter: Adapter | None) -> None:
        """Make all steps after the last bucket, but for the proof."""
        for step in walk(self.state, PATH_FROM_LOADING if adapter is None else PATH_WITH_ADAPTERS):
            await self.perform(step, lambda step=step: self._simple(step, transport, label, adapter))  # type: ignore[misc]

    def release(self) -> None:
        """Release its memory, if it holds checked weights; they are lost. Called outside of any event loop."""
        if self.state is not State.READY:
            return
        for step, path, body in (
            (Step.PAUSE, "/pause_generation", {"mode": "retract"}),  # SGLang crashes if it is not idle
            (Step.RELEASE, "/release_memory_occupation", {"tags": MEMORY}),
        ):
            then = after(self.state, step)
            try:
                self.client.post_now(path, body, DEADLINES[step])
            except Fault as fault:
                raise self.broken(step, fault) from fault
            self.state = then

    async def _simple(self, step: Step, transport: Transport, label: str = "", adapter: Adapter | None = None) -> None:
        """Make a step that is a call or two."""
        brackets = transport.brackets and self._brackets
        if step is Step.END:
            await transport.finish(self.client)
        if step is Step.ADAPT and adapter is not None and self.adapter is not None:
            await transport.adapt(self.client, self.tp, self.adapter, adapter)
        if step is Step.BEGIN and not self._brackets and self.state is State.PAUSED:
            await self.client.post("/flush_cache", {}, DEADLINES[step])  # such releases crash if anything is cached
        calls: Mapping[Step, tuple[str, Any] | None] = {
            Step.PAUSE: ("/pause_generation", {"mode": "retract" if self._brackets and not self.adapter else "abort"}),
            Step.RESUME_WEIGHTS: ("/resume_memory_occupation", {"tags": MEMORY[:1]}),
            Step.BEGIN: ("/begin_weight_update", {}) if brackets else None,
            Step.END: ("/end_weight_update", {}) if brackets else None,
            Step.RESUME_KV: ("/resume_memory_occupation", {"tags": MEMORY[1:]}),
            Step.ADAPT: None,
            Step.FLUSH: ("/flush_cache", {}),
            Step.LABEL: ("/update_weight_version", {"new_version": label, "abort_all_requests": False}),
            Step.CONTINUE: ("/continue_generation", {}),
        }
        if (call := calls[step]) is not None:
            await self.client.post(*call, DEADLINES[step])

    # requests

    async def ask(self, body: dict[str, Any], deadline: float) -> dict[str, Any]:
        """Return the answer to a generation request.

        Raises:
            Fault: There was none; also if the server gave no sign of life for too long while this waited.
        """
        self.in_flight += 1
        if self._watch is None or self._watch.done():
            self._hung = asyncio.get_running_loop().create_future()
            self._watch = asyncio.create_task(self._keep_watch(self._hung))
        assert self._hung is not None
        call = asyncio.create_task(self.generate(body, deadline))
        hung = self._hung
        try:
            await asyncio.wait((call, hung), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise Hung(f"{self.url} gave no sign of life for {self._retry.hang_seconds:g} s")
            answer: dict[str, Any] = call.result()
            return answer
        finally:
            call.cancel()
            self.in_flight -= 1

    async def generate(self, body: dict[str, Any], deadline: float) -> Any:
        """Return the answer to a generation request, sampled with the adapters, if it has any."""
        return await self.client.post("/generate", body | {"lora_path": self.adapter}, deadline)

    async def _keep_watch(self, hung: asyncio.Future[None]) -> None:
        """While requests are in flight, look whether the server lives."""
        while self.in_flight:
            await asyncio.sleep(min(WATCH_SECONDS, self._retry.hang_seconds / 4))
            ended = self.process is not None and not self.process.alive
            well = not ended and (self.lock.locked() or await self.healthy(self._retry.hang_seconds))
            if not well and not hung.done():
                hung.set_result(None)
                return

    def _end_watch(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        if self._hung is not None and not self._hung.done():
            self._hung.set_result(None)
