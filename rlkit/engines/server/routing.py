"""Which server a conversation goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rlkit.engines.server.server import InferenceServer

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

    def reassign_if_lost(self, session: str) -> None:
        """Let a conversation choose another endpoint if its own is lost."""
        if session in self._assignments and self._lost(self._assignments[session]):
            del self._assignments[session]

    def _lost(self, endpoint: InferenceServer) -> bool:
        return all(server.lost for server in self.endpoints[endpoint])
