"""Open connections, by the tenants that used them last: of too many idle ones the oldest is closed."""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from aiohttp.web_protocol import RequestHandler

STRANGERS = 256
"""The most connections that have had no request with a key of this server."""
IDLE = 1024
"""The most connections of a tenant that carry no request; the SDK keeps some hundreds for those to come."""


class ClientConnections:
    """Open connections; one that carries a request is bounded as that request is."""

    def __init__(self) -> None:
        self._owners: dict[RequestHandler, str] = {}
        self._idle: defaultdict[str, dict[RequestHandler, None]] = defaultdict(dict)
        """By tenants, empty for strangers; the longest idle first."""

    def accept(self, connection: RequestHandler) -> RequestHandler:
        """Return a new connection, a stranger's."""
        self._rest(connection, "")
        return connection

    @contextmanager
    def used(self, connection: RequestHandler, tenant: str) -> Iterator[None]:
        """Let a connection carry a request of a tenant."""
        self._forget(connection)
        try:
            yield
        finally:
            if connection.transport is not None:  # it is still open
                self._rest(connection, tenant)

    def _rest(self, connection: RequestHandler, tenant: str) -> None:
        idle = self._idle[tenant]
        self._owners[connection] = tenant
        idle[connection] = None
        most = IDLE if tenant else STRANGERS
        if len(idle) > most:
            for closed in [other for other in idle if other.transport is None and other is not connection]:
                self._forget(closed)
        if len(idle) > most:
            oldest = next(iter(idle))
            self._forget(oldest)
            if oldest.transport is not None:
                oldest.transport.abort()

    def _forget(self, connection: RequestHandler) -> None:
        owner = self._owners.pop(connection, None)
        if owner is not None:
            del self._idle[owner][connection]
            if not self._idle[owner]:
                del self._idle[owner]


def raise_file_limit() -> None:
    """Let this process have as many open files, and so connections, as the system allows it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # where no limit is no number
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
