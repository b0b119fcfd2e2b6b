"""The servers of a run, and which of them a conversation goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from rlkit_servers.server import InferenceServer
from rlkit_servers.states import ServerState

SERVING = frozenset({ServerState.READY, ServerState.OFFLOADED})
"""States of servers that are not down."""

MAX_SESSIONS = 65536
"""Conversations whose server is remembered."""


class LoadBalancer:
    """Distributes conversations among endpoints; each stays with the one that has its prefix in the cache.

    Args:
        endpoints: Servers or routers that requests are sent to, each with the servers behind it (a server itself).
    """

    def __init__(self, endpoints: Mapping[InferenceServer, Sequence[InferenceServer]]) -> None:
        self.endpoints = endpoints
        self._assignments: OrderedDict[str, InferenceServer] = OrderedDict()

    def choose(self, session: str) -> InferenceServer:
        """Return the conversation's endpoint; a new conversation gets the least busy one that is not lost."""
        endpoint = self._assignments.pop(session, None)
        if endpoint is None:
            endpoint = min(self.endpoints, key=lambda e: (self._lost(e), e.assigned))
        self._assignments[session] = endpoint
        if len(self._assignments) > MAX_SESSIONS:
            self._assignments.popitem(last=False)
        return endpoint

    @property
    def has_living(self) -> bool:
        """Whether an endpoint is not lost."""
        return not all(map(self._lost, self.endpoints))

    def reassign_if_lost(self, session: str) -> None:
        """Let a conversation choose another endpoint if its own is lost."""
        if session in self._assignments and self._lost(self._assignments[session]):
            del self._assignments[session]

    def _lost(self, endpoint: InferenceServer) -> bool:
        return all(server.lost for server in self.endpoints[endpoint])


class Fleet:
    """The servers of a run from one rank's side; empty until `bind`."""

    def __init__(self) -> None:
        self.owned: list[InferenceServer] = []
        """Servers that this rank pushes weights to."""
        self.servers: list[InferenceServer] = []
        """Servers that sample this rank's requests."""
        self.balancer = LoadBalancer({})
        self.restarts = 0

    def use(
        self, servers: Sequence[InferenceServer], endpoints: Mapping[InferenceServer, Sequence[InferenceServer]]
    ) -> None:
        """Sample requests on these servers, each of them behind one of the endpoints."""
        self.servers = list(servers)
        self.balancer = LoadBalancer(endpoints)

    @property
    def with_weights(self) -> list[InferenceServer]:
        """All servers that hold the trainer's weights, whichever rank pushes these."""
        return list(dict.fromkeys((*self.owned, *self.servers)))

    @property
    def endpoints(self) -> list[InferenceServer]:
        """All addresses of this rank: the servers, and a router in front of them."""
        return list(dict.fromkeys((*self.with_weights, *self.balancer.endpoints)))

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of this rank's ready servers, by their first addresses: a restart may change them."""
        return {server.first_url: server.url for server in self.owned if server.state is ServerState.READY}

    def move(self, addresses: Iterable[Mapping[str, str]]) -> None:
        """Take over the `addresses` of all ranks: servers of other ranks that are not among them are not ready."""
        by_first_url = {first_url: url for ready in addresses for first_url, url in ready.items()}
        for server in self.servers:
            if not server.owned:
                server.api.client.move(by_first_url.get(server.first_url, server.url))
                server.state = ServerState.READY if server.first_url in by_first_url else ServerState.COLD

    async def restart(self, server: InferenceServer) -> None:
        """Restart a server, or wait for one that rlkit did not start.

        Raises:
            EngineError: The server was restarted too often, or does not come back.
        """
        self.restarts += 1
        await server.restart()

    def health(self) -> dict[str, float]:
        """Return the number of servers, and of those that are down."""
        down = sum(server.state not in SERVING for server in self.servers)
        return {"servers": float(len(self.servers)), "servers_down": float(down)}

    def close(self) -> None:
        """Drop all connections, and kill the servers that rlkit started."""
        for endpoint in self.endpoints:
            endpoint.close()
