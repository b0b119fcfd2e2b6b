"""How long servers are waited for."""

from __future__ import annotations

from dataclasses import dataclass

from rlkit.ranges import Repeats, Seconds


@dataclass(frozen=True)
class RetryPolicy:
    """How long servers are waited for, and how often they may fail.

    Args:
        request_seconds: For one request, retries included, unless it states its own deadline.
        start_seconds: Until a server that was started answers.
        hang_seconds: Without an answer to a health check, after which a server that has work counts as dead.
        retries: Further attempts of a request, with growing pauses.
        restarts: Of each server between two syncs, before the run ends.
    """

    request_seconds: Seconds = 1800.0
    start_seconds: Seconds = 600.0
    hang_seconds: Seconds = 60.0
    retries: Repeats = 5
    restarts: Repeats = 3
