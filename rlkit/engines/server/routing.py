"""Which server a conversation goes to."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

from rlkit.engines.server.node import Node

SESSIONS = 65536
"""Conversations whose server is remembered."""


class Balance:
    """Distributes conversations among servers, and keeps each with the server that has its prefix in the cache.

    Args:
        fronts: What requests are sent to, each with the servers behind it: itself, if it is no router.
    """

    def __init__(self, fronts: Mapping[Node, Sequence[Node]]) -> None:
        self.fronts = fronts
        self._homes: OrderedDict[str, Node] = OrderedDict()

    def choose(self, session: str) -> Node:
        """Return the conversation's server; a new one's is the one with the fewest requests, a lost one the last."""
        node = self._homes.pop(session, None) or min(self.fronts, key=lambda n: (self._lost(n), n.assigned))
        self._homes[session] = node
        if len(self._homes) > SESSIONS:
            self._homes.popitem(last=False)
        return node

    def leave_lost(self, session: str) -> None:
        """Let a conversation choose another server, if its own is lost."""
        if session in self._homes and self._lost(self._homes[session]):
            del self._homes[session]

    def _lost(self, front: Node) -> bool:
        return all(server.lost for server in self.fronts[front])
