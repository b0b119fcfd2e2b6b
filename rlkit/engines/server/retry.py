"""How long servers are waited for."""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.concurrency.retry import RetryPolicy
from rlkit.ranges import Repeats, Seconds


@dataclass(frozen=True)
class ServerRetryPolicy(RetryPolicy):
    """How long servers are waited for, and how often they may fail.

    Args:
        retries: Further attempts of a request, with growing pauses.
        request_seconds: For one request, all attempts and pauses included, unless it states its own deadline.
        attempt_seconds: For one attempt; null for as long as the request may take.
        start_seconds: Until a server that was started answers.
        hang_seconds: Without an answer to a health check, after which a server that has work counts as dead.
        restarts: Of each server between two syncs, before the run ends.
    """

    start_seconds: Seconds = 600.0
    hang_seconds: Seconds = 60.0
    restarts: Repeats = 3
