"""The weights of a run's servers: their versions, and how they are kept at the trainer's."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rlkit.base.errors import EngineError
from rlkit_servers.fleet import Fleet
from rlkit_servers.push import Failures, Mismatch, Push
from rlkit_servers.server import InferenceServer
from rlkit_servers.states import ServerState
from rlkit_servers.threads import off_loop
from rlkit_servers.weight_check import ExpectedLogps, policy_logps, probe_rows

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime, WeightStream

T = TypeVar("T")


class WeightSync:
    """Pushes the trainer's weights to servers, checks that they arrived, and names their versions.

    Args:
        fleet: The servers.
        check: Whether to compare log-probs with the trainer's after every push.
        adapter_only: Whether to push the base once, and then the adapters alone.
    """

    def __init__(self, fleet: Fleet, check: bool, adapter_only: bool) -> None:
        self.version = -1
        self.starved = False
        """Whether requests wait for a server that only a sync can restore."""
        self.seconds = 0.0
        """Duration of the last sync."""
        self.lock = threading.Lock()
        """Held while the trainer changes the weights, and while a restoration reads them."""
        self._training = contextlib.ExitStack()
        self._pushing = asyncio.Lock()
        self._fleet = fleet
        self._check = check
        self._adapter_only = adapter_only
        self._stream: WeightStream | None = None
        self._expected: ExpectedLogps | None = None

    def bind(self, runtime: Runtime, push: Push, run: str) -> None:
        """Connect to the run.

        Args:
            runtime: The run's device and ranks.
            push: Pushes weights.
            run: The run's name in labels of weights.
        """
        self._runtime = runtime
        self._push = push
        self._run = run
        self._policy_logps = partial(policy_logps, runtime)
        self._rows = probe_rows(runtime.tokenizer, runtime.context) if self._check else []

    # versions

    def label(self, version: int) -> str:
        """Return the label of a version of the weights."""
        return f"{self._run}-{version}"

    def version_of(self, label: str) -> int:
        """Return the version that a label of this run names; -1 for any other label."""
        run, _, version = label.partition("-")
        return int(version) if run == self._run and version.isdecimal() else -1

    async def are_current(self, server: InferenceServer) -> bool:
        """Check whether a server responds that it has the current version."""
        return await server.weight_version() == self.label(self.version)

    @property
    def pushed(self) -> bool:
        """Whether there has been a sync."""
        return self._stream is not None

    # pushes

    async def sync(self, stream: WeightStream, version: int) -> None:
        """Push a version of the weights to all servers; all ranks must call this.

        Servers that are down are left out while others of this rank are not.

        Raises:
            EngineError: A server cannot take the weights, or has other log-probs than the trainer.
        """
        started = time.perf_counter()
        first = not self.pushed
        self._stream = stream
        if self._check:
            logps = await off_loop(self._runtime.device, lambda: self._policy_logps(self._rows))
            self._expected = ExpectedLogps(self._rows, logps)
        async with contextlib.AsyncExitStack() as stack:
            owned = [s for s in self._fleet.owned if not s.restoring and s.state is not ServerState.BROKEN]
            owned = owned or self._fleet.owned
            others = [server for server in self._fleet.servers if not server.owned]
            for server in (*owned, *others):  # also other ranks', or requests would start with old weights
                await stack.enter_async_context(server.lock)
                server.restarts = 0 if version != self.version else server.restarts
            await stack.enter_async_context(self._pushing)
            self.version = version
            self.starved = False
            wrong = await self._push_until_healthy(stream, owned, first)
            for server in set(self._fleet.owned) - set(owned):
                if server.state is ServerState.READY:  # it came back with the weights of before
                    server.state = ServerState.COLD
            self._fleet.move(await self._gather(self._fleet.addresses))
            if first and self._check:
                right = [server for server in owned if server not in wrong]
                wrong |= await self._push.check_sampling(right, self._rows[0], self._policy_logps)
            if any(await self._gather(bool(wrong))):
                error = await self._push.diagnose(stream, wrong, self.label(version), self._expected)
                raise error or EngineError("the weights of another rank's server are wrong; see its error")
        self.seconds = time.perf_counter() - started

    async def _push_until_healthy(self, stream: WeightStream, pending: list[InferenceServer], first: bool) -> Failures:
        """Push to servers; return those with wrong weights.

        After the first sync, servers that fail stay broken while others are ready; otherwise they are restarted and
        pushed to again. All ranks read the stream the same number of times.
        """
        wrong: Failures = {}
        while True:
            incomplete = any(server.state is not ServerState.READY for server in pending)
            base = not self._adapter_only or any(await self._gather(incomplete))
            failed = await self._push.push(stream, pending, self.label(self.version), self._expected, base)
            wrong |= {server: error for server, error in failed.items() if isinstance(error, Mismatch)}
            pending = [server for server in failed if server not in wrong]
            if not first and any(server.state is ServerState.READY for server in self._fleet.owned):
                pending = [server for server in pending if server.state is not ServerState.BROKEN]
            if not any(await self._gather(bool(pending))):
                return wrong
            fatal: EngineError | None = None
            for server in pending:
                try:
                    if server.state is not ServerState.BROKEN:  # it never came up, so a restart would not help
                        raise failed[server]
                    await self._fleet.restart(server)
                except EngineError as error:
                    fatal = error
            if any(await self._gather(fatal is not None)):
                raise fatal or EngineError("a server of another rank failed; see its error")

    async def push_again(self, server: InferenceServer) -> EngineError | None:
        """Push the current weights to one server, unless the trainer is changing them; return an error if this fails.

        Only for weights that are not sharded: this rank alone reads them.
        """
        assert self._stream is not None
        async with self._pushing:
            # agreed: the trainer's weights are not sharded, so no other rank takes part
            if not self.lock.acquire(blocking=False):
                return None
            try:
                failed = await self._push.push(self._stream, [server], self.label(self.version), self._expected)
            finally:
                self.lock.release()
        return failed.get(server)

    async def _gather(self, here: T) -> list[T]:
        """Return the value of every rank; every rank must call this. The event loop keeps running."""
        return await off_loop(self._runtime.device, lambda: self._runtime.gather_world(here))

    # the run

    @property
    def needed(self) -> bool:
        """Whether servers need a sync before they can sample."""
        offloaded = any(server.state is ServerState.OFFLOADED for server in self._fleet.owned)
        return not self.pushed or self.starved or offloaded

    def lock_for_training(self) -> None:
        """Let no restoration read the weights from now on; waits for one in progress."""
        self._training.enter_context(self.lock)

    def unlock(self) -> None:
        """Let restorations read the weights."""
        self._training.close()

    def health(self) -> dict[str, float]:
        """Return the largest gap to the trainer's log-probs, and what the last sync took and sent."""
        gauges = {"weight_gap": self._push.gap.max, "sync_seconds": self.seconds}
        sent = self._push.transport.sent
        if sent is not None and self._fleet.owned:
            gauges |= {"sync_bytes": float(sent.bytes), "full_syncs": float(sent.full_updates)}
            gauges["changed_share"] = sent.changed_share
        return gauges

    def close(self) -> None:
        """Free what pushes hold."""
        if hasattr(self, "_push"):
            self._push.transport.close()
