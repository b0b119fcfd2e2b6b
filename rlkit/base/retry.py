"""Requests to services: what is attempted again, how often, and for how long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import TypeVar

from rlkit.base.deadlines import deadline
from rlkit.base.ranges import Repeats, Seconds

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
"""Seconds before the second attempt and before late ones, each between half and one and a half times that."""

TRANSIENT_STATUSES = frozenset({408, 429})
"""HTTP statuses below 500 that do not mean that the request itself is wrong."""


class ServiceError(Exception):
    """A request failed.

    Args:
        message: What failed.
        status: The HTTP status; None where there was no answer.

    Attributes:
        attempts: How often it was attempted.
        pause: Seconds for which the service asks to be left alone.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.attempts = 1
        self.pause = 0.0

    @property
    def refused(self) -> bool:
        """Whether the service refused the request itself, which would fail again."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in TRANSIENT_STATUSES


@dataclass(frozen=True)
class RetryPolicy:
    """How often, and for how long, a request to a service is attempted.

    Attempted again is what had no answer, one with an HTTP status of 408, 429 or 5xx, or one that cannot be read.

    Args:
        retries: Further attempts of a request, with growing pauses.
        request_seconds: For one request, all attempts and pauses included.
        attempt_seconds: For one attempt; null for as long as the request may take.
    """

    retries: Repeats = 5
    request_seconds: Seconds = 1800.0
    attempt_seconds: Seconds | None = None

    async def call(self, attempt: Callable[[float], Awaitable[T]], seconds: float | None = None) -> T:
        """Return the result of the first attempt that succeeds.

        Args:
            attempt: Makes one attempt, within the seconds that it is called with.
            seconds: For the request, instead of `request_seconds`.

        Raises:
            ServiceError: The last attempt's.
            TimeoutError: There was no result in time; its cause is the last attempt's error, if one had ended.
        """
        seconds = seconds or self.request_seconds
        failed: ServiceError | None = None
        try:
            async with deadline(seconds):
                for number in count(1):
                    try:
                        return await attempt(min(seconds, self.attempt_seconds or seconds))
                    except ServiceError as error:
                        failed, error.attempts = error, number
                        if error.refused or number > self.retries:
                            raise
                    await asyncio.sleep(max(_pause(number), failed.pause))
        except TimeoutError as error:
            raise TimeoutError(f"there was no answer within {seconds:g} s") from failed or error
        raise AssertionError("unreachable")


def _pause(failures: int) -> float:
    """Return the seconds to wait after so many failures: random, so that many clients do not come back at once."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10)) * (0.5 + random.random())
