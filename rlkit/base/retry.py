"""Requests to services: what is attempted again, how often, and for how long."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

from rlkit.base.deadlines import deadline
from rlkit.base.errors import shorten
from rlkit.base.ranges import Repeats, Seconds

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

FIRST_PAUSE, LONGEST_PAUSE = 0.2, 30.0
"""Seconds before the second attempt and before late ones, each between half and one and a half times that."""

TRANSIENT_STATUSES = frozenset({408, 429})
"""HTTP statuses below 500 that do not mean that the request itself is wrong."""

MAX_BYTES = 2**22
"""Of a response; a longer one is an error."""
MAX_QUOTED = 500
"""Characters of a response that an error message quotes."""


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


class OversizedError(ServiceError):
    """A service answered with more than `MAX_BYTES`."""


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


async def post_json(session: aiohttp.ClientSession, url: str, body: bytes, seconds: float) -> dict[str, Any]:
    """Return the JSON object with which a service answers one request.

    Raises:
        ServiceError: There was no answer in time, or it is an error, too long or no JSON object.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=seconds)
    try:
        async with session.post(url, data=body, timeout=timeout, allow_redirects=False) as response:
            content = bytearray()
            async for chunk in response.content.iter_chunked(2**16):
                content += chunk
                if len(content) > MAX_BYTES:
                    raise OversizedError(f"answered more than {MAX_BYTES:,} bytes")
            if response.status != 200:
                text = shorten(content.decode(errors="replace"), MAX_QUOTED)
                error = ServiceError(f"answered {response.status}: {text}", response.status)
                error.pause = _seconds(response.headers.get("Retry-After", ""))
                raise error
            answer = json.loads(content)
    except TimeoutError as error:
        raise ServiceError(f"did not answer within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        raise ServiceError(f"failed with {type(error).__name__}: {error}") from error
    if not isinstance(answer, dict):
        raise ServiceError(f"answered {shorten(str(answer), MAX_QUOTED)}, expected an object")
    return answer


def _seconds(text: str) -> float:
    """Return the seconds of a Retry-After header; 0 if it states none."""
    return float(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0.0


def _pause(failures: int) -> float:
    """Return the seconds to wait after so many failures: random, so that many clients do not come back at once."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10)) * (0.5 + random.random())
