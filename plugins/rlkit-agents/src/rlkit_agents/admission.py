"""What the requests of a session may use at once: it is charged before they are read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlkit_agents.request import RequestError

OPEN_BYTES = 64 * 2**20
"""Of all bodies of a session at once."""


class Admission:
    """Admits requests of a session while it has few enough, and bytes of their bodies.

    Args:
        requests: How many it may have at once.
        counts: Of the session, where refused requests are counted.
    """

    def __init__(self, requests: int, counts: Counter[str]) -> None:
        self._limit = requests
        self._counts = counts
        self.requests = self.bytes = 0

    @contextmanager
    def request(self) -> Iterator[Callable[[int], None]]:
        """Hold a request; yield what charges it with bytes of its body.

        Raises:
            RequestError: The session has too many requests, or too many bytes in them.
        """
        if self.requests >= self._limit:
            raise self._refused(f"{self.requests} requests in flight, expected at most {self._limit}")
        charged = 0

        def charge(count: int) -> None:
            nonlocal charged
            if self.bytes + count > OPEN_BYTES:
                raise self._refused(f"more than {OPEN_BYTES >> 20} MiB of bodies in flight")
            charged += count
            self.bytes += count

        self.requests += 1
        try:
            yield charge
        finally:
            self.requests -= 1
            self.bytes -= charged

    def _refused(self, what: str) -> RequestError:
        self._counts["requests_refused"] += 1
        return RequestError(f"the session has {what}; wait for an answer", status=429, kind="rate_limit_error")
