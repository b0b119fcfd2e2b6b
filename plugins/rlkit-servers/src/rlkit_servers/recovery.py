"""Bringing servers back after faults, while requests wait for them."""

from __future__ import annotations

import asyncio
import warnings

from rlkit.base.errors import EngineError
from rlkit_servers.fleet import Fleet
from rlkit_servers.http import Fault
from rlkit_servers.push import Mismatch
from rlkit_servers.server import Hung, InferenceServer
from rlkit_servers.states import ServerState
from rlkit_servers.threads import run_detached
from rlkit_servers.weights import WeightSync

OWNER_SECONDS = 0.5
"""How often a rank checks whether another rank has restored a server."""


class Recovery:
    """Checks servers after faults and restores them.

    Args:
        fleet: The servers.
        weights: Their weights.
        hang_seconds: Time without a response to a health check after which a server counts as dead.
    """

    def __init__(self, fleet: Fleet, weights: WeightSync, hang_seconds: float) -> None:
        self._fleet = fleet
        self._weights = weights
        self._hang_seconds = hang_seconds
        self.sharded = False
        """Whether the trainer's weights are sharded, so that one rank alone cannot restore a server."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def wait_ready(self, server: InferenceServer) -> None:
        """Wait until a server can sample: no sync is running, its memory is resumed, its faults are repaired.

        This rank cannot restore a server that another rank pushes to, or one that takes sharded weights, nor any server
        while the trainer changes the weights. The engine then needs a sync, and this waits for it.

        Raises:
            EngineError: The server cannot be brought back, and the run cannot continue.
        """
        while server.lock.locked() or server.state is not ServerState.READY:
            if not self._weights.pushed:
                raise EngineError("a request came before the first sync: there are no weights yet")
            await run_detached(self._bring_back(server))
            if server.state is ServerState.READY:  # the lock may stay taken by one waiting request after another
                return
            self._weights.starved = True
            await asyncio.sleep(OWNER_SECONDS)

    async def check(self, server: InferenceServer, repairs: int, fault: Fault) -> bool:
        """Check a server after a fault; of the requests that failed together, the first one does so for all.

        Args:
            server: The server.
            repairs: Its count of repairs when the request was sent.
            fault: The request's fault.

        Returns:
            Whether this request was the first.
        """
        async with server.lock:
            if server.repairs != repairs:
                return False
            healthy = not isinstance(fault, Hung) and await server.healthy(self._hang_seconds)
            if not healthy and server.owned:
                server.mark_broken("answer", fault)
            elif not healthy or not await self._weights.are_current(server):
                server.state = ServerState.COLD
            server.repairs += 1
            return True

    def restore_in_background(self) -> None:
        """Bring back this rank's broken servers while the others go on; one that fails is tried after the next sync."""
        for server in self._fleet.owned:
            if server.state is ServerState.BROKEN and not server.restoring:
                server.restoring = True
                task = asyncio.create_task(self._restore_in_background(server))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _restore_in_background(self, server: InferenceServer) -> None:
        try:
            async with server.lock:
                if self.sharded and server.state is ServerState.BROKEN:
                    await self._fleet.restart(server)  # it joins at the next sync
                elif not self.sharded and server.state is not ServerState.READY:
                    await self._restore(server)
        except EngineError as error:
            warnings.warn(f"{error}\nThe run goes on with its other servers", stacklevel=2)
        finally:
            server.restoring = False

    async def _bring_back(self, server: InferenceServer) -> None:
        """Restore a server, or note that the rank that pushes weights to it has done so."""
        async with server.lock:
            lost = server.state is not ServerState.READY
            if lost and server.owned and not self.sharded:
                await self._restore(server)
            elif lost and not server.owned and await self._weights.are_current(server):
                server.state = ServerState.READY

    async def _restore(self, server: InferenceServer) -> None:
        """Restart a broken server and push the current weights again, unless the trainer is changing them."""
        while True:
            if server.state is ServerState.BROKEN:
                await self._fleet.restart(server)
            error = await self._weights.push_again(server)
            if error is None:
                return
            if isinstance(error, Mismatch) or server.state is not ServerState.BROKEN:
                raise error
