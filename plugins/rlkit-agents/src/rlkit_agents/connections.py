"""Open connections, by the session that used them last: of too many idle ones the oldest is closed."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rlkit_agents.session import AgentSession

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

STRANGERS = 256
"""Connections of no session: those without a request yet, with an unknown key, refused, or of a session that ended."""
CLOSE_SECONDS = 5.0
"""In which the requests of a session that ends are answered."""


class Connections:
    """Open connections. Each is a stranger until a session admits a request on it, and idle between two requests."""

    def __init__(self) -> None:
        self._sessions: dict[RequestHandler, AgentSession | None] = {}
        self._idle: defaultdict[str, dict[RequestHandler, None]] = defaultdict(dict)
        """By the session's id, empty for strangers; the longest idle first."""

    def accept(self, connection: RequestHandler) -> RequestHandler:
        """Return a new connection."""
        self._rest(connection, None)
        return connection

    @contextmanager
    def used(self, connection: RequestHandler, session: AgentSession) -> Iterator[None]:
        """Let a connection carry a request that a session has admitted."""
        self._forget(connection)
        self._sessions[connection] = session
        try:
            yield
        finally:
            self._rest(connection, None if session.closed else session)

    def close(self, session: AgentSession) -> None:
        """Make idle connections of a session that has ended strangers, and close those whose requests go on.

        An HTTP client that several agents share may send another session's request on an idle one just now.
        """
        for connection in self._idle.pop(session.id, ()):
            self._rest(connection, None)
        for connection in [c for c, user in self._sessions.items() if user is session]:
            asyncio.get_running_loop().call_later(CLOSE_SECONDS, self._close_late, connection, session)

    def _close_late(self, connection: RequestHandler, session: AgentSession) -> None:
        if self._sessions.get(connection) is session:
            self._close(connection)

    def _rest(self, connection: RequestHandler, session: AgentSession | None) -> None:
        """Make a connection the youngest idle one of a session or, without a session, among strangers."""
        idle = self._idle["" if session is None else session.id]
        self._sessions[connection] = session
        idle[connection] = None
        if len(idle) > (STRANGERS if session is None else session.limits.concurrent):
            self._close(next(iter(idle)))

    def _forget(self, connection: RequestHandler) -> None:
        if connection in self._sessions:
            session = self._sessions.pop(connection)
            self._idle["" if session is None else session.id].pop(connection, None)

    def _close(self, connection: RequestHandler) -> None:
        self._forget(connection)
        if connection.transport is not None:
            connection.transport.abort()  # nobody may read what is still to be sent
