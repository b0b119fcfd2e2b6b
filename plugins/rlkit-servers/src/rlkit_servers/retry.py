"""How long to wait for servers."""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.base.ranges import Repeats, Seconds
from rlkit.base.retry import RetryPolicy


@dataclass(frozen=True)
class ServerRetryPolicy(RetryPolicy):
    """How long to wait for servers, and how often they may fail.

    Args:
        retries: Further attempts of a request, with growing pauses.
        request_seconds: Time limit of a request with all attempts and pauses, unless it has its own deadline.
        attempt_seconds: Time limit of one attempt; null for that of the request.
        start_seconds: Time limit for a started server's first healthy response.
        hang_seconds: Time without a response to a health check after which a busy server counts as dead.
        restarts: Restarts of each server between two syncs before the run ends.
    """

    start_seconds: Seconds = 600.0
    hang_seconds: Seconds = 60.0
    restarts: Repeats = 3
