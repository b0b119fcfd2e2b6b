"""Requests over HTTP: the one client, and what is attempted again, how often, and for how long."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import socket
from base64 import b64encode
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from itertools import count
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar
from urllib.parse import SplitResult, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from rlkit.base.deadlines import deadline
from rlkit.base.errors import RecipeError, shorten
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
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_REDIRECTS = 5
"""Within one host, for an address that data name."""
CHUNK_BYTES = 2**16


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
    """A service answered with more than the client reads."""


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


class Response(NamedTuple):
    """A response that was read to its end."""

    status: int
    headers: Mapping[str, str]
    content: bytes

    def check(self) -> None:
        """Check that the request succeeded.

        Raises:
            ServiceError: Its status is not 200; the message quotes the response.
        """
        if self.status == 200:
            return
        text = shorten(" ".join(self.content.decode(errors="replace").split()), MAX_QUOTED)
        if self.status in REDIRECTS:
            text = f"a redirect to {_host(self.headers.get('Location', '')) or 'no other host'}, which is not followed"
        error = ServiceError(f"answered {self.status}: {text}", self.status)
        pause = self.headers.get("Retry-After", "")
        error.pause = float(pause) if pause.isascii() and pause.isdigit() and len(pause) < 6 else 0.0
        raise error


class HttpClient:
    """Sends requests to a service that the user names, over connections that are used again.

    No redirect is followed: the headers reach this host alone. What is read ends at the deadline and at `max_bytes`.

    Args:
        url: The service's address; a login in it becomes a header.
        headers: Headers of every request.
        max_bytes: Of a response; a longer one is an error.
        idle_seconds: Connections idle for longer are not used again.
        proxy: The address of a proxy; None for none.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str] | None = None,
        *,
        max_bytes: int = MAX_BYTES,
        idle_seconds: float = 15.0,
        proxy: str | None = None,
    ) -> None:
        self.url, login = _split_login(url)
        self.max_bytes = max_bytes
        self.proxy = proxy
        self._headers = login | dict(headers or {})
        self._idle_seconds = idle_seconds
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def request(
        self, method: str, path: str, body: bytes | BinaryIO | None = None, *, seconds: float
    ) -> Response:
        """Return the response to a request, whatever its status; a body of bytes is JSON.

        Raises:
            ServiceError: There was none in time, or it is too long.
        """
        import aiohttp

        options: dict[str, Any] = {"timeout": aiohttp.ClientTimeout(total=seconds), "proxy": self.proxy}
        if isinstance(body, bytes):
            options["headers"] = {"Content-Type": "application/json"}
        try:
            return await _exchange(self._open(), method, self.url + path, self.max_bytes, data=body, **options)
        except TimeoutError as error:
            raise ServiceError(f"did not answer within {seconds:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise ServiceError(f"failed with {type(error).__name__}: {error}") from error

    async def post_json(self, path: str, body: bytes, seconds: float) -> dict[str, Any]:
        """Return the JSON object with which the service answers.

        Raises:
            ServiceError: There was no answer in time, or it is an error, too long or no JSON object.
        """
        response = await self.request("POST", path, body, seconds=seconds)
        response.check()
        try:
            answer = json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise ServiceError(f"failed with {type(error).__name__}: {error}") from error
        if not isinstance(answer, dict):
            raise ServiceError(f"answered {shorten(str(answer), MAX_QUOTED)}, expected an object")
        return answer

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        loop = asyncio.get_running_loop()
        if self._session is None or self._loop is not loop:
            self.close()
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=self._idle_seconds)
            self._session = _session(connector, self._headers)
            self._loop = loop
        return self._session

    async def finish(self) -> None:
        """Close the connections, on the event loop that they were opened on."""
        session = self._session
        self._session = None
        if session is not None:
            await session.close()

    def close(self) -> None:
        """Drop the connections, from any thread."""
        session, loop = self._session, self._loop
        self._session = None
        if session is None or loop is None or loop.is_closed():
            return
        if loop.is_running():  # in this thread or another
            self._closing = asyncio.run_coroutine_threadsafe(session.close(), loop)
        else:
            loop.run_until_complete(session.close())


def require_http(part: str) -> None:
    """Check that requests can be sent.

    Raises:
        RecipeError: aiohttp is not installed.
    """
    try:
        import aiohttp  # noqa: F401
    except ImportError as error:
        raise RecipeError(f"{part} needs aiohttp, which is not installed; pip install aiohttp") from error


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment sets for an address; None for none."""
    parts = _split(url)
    proxy = None if proxy_bypass(parts.netloc.rpartition("@")[2]) else getproxies().get(parts.scheme)
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def fetch(url: str, max_bytes: int, seconds: float, *, private: bool = False) -> bytes:
    """Return the body at an address that data name, without credentials; redirects are followed within its host.

    Args:
        url: The address.
        max_bytes: Of the body.
        seconds: For everything.
        private: Whether its host may have an address within this machine or its network.

    Raises:
        ServiceError: It is private, leads to another host, cannot be reached in time, or is too long.
    """
    import aiohttp

    try:
        return run_now(_fetch(url, max_bytes, seconds, private))
    except TimeoutError as error:
        raise ServiceError(f"did not answer within {seconds:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise ServiceError(f"failed with {type(error).__name__}: {error}") from error


def run_now(work: Coroutine[object, object, T]) -> T:
    """Run a coroutine from code that is not asynchronous, within an event loop or not."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _fetch(url: str, max_bytes: int, seconds: float, private: bool) -> bytes:
    import aiohttp

    connector = aiohttp.TCPConnector(socket_factory=None if private else _public_socket)
    async with asyncio.timeout(seconds), _session(connector, {}) as session:
        for _ in range(MAX_REDIRECTS):
            response = await _exchange(session, "GET", url, max_bytes)
            target = urljoin(url, response.headers.get("Location", ""))
            if response.status not in REDIRECTS or _host(target) != _host(url):
                break
            url = target
    response.check()
    return response.content


async def _exchange(session: aiohttp.ClientSession, method: str, url: str, max_bytes: int, **options: Any) -> Response:
    async with session.request(method, url, allow_redirects=False, **options) as response:
        if response.headers.get("Content-Encoding", "identity") != "identity":  # a small one may hold a huge body
            raise ServiceError("answered with a compressed body, which was not asked for")
        content = bytearray()
        async for chunk in response.content.iter_chunked(CHUNK_BYTES):
            content += chunk
            if len(content) > max_bytes:
                raise OversizedError(f"answered more than {max_bytes:,} bytes")
        return Response(response.status, response.headers, bytes(content))


def _session(connector: aiohttp.TCPConnector, headers: Mapping[str, str]) -> aiohttp.ClientSession:
    import aiohttp

    headers = {"Accept-Encoding": "identity", **headers}
    return aiohttp.ClientSession(connector=connector, headers=headers, auto_decompress=False)


def _public_socket(info: tuple[Any, ...]) -> socket.socket:
    """Open a socket for an address that a name has been resolved to, unless it is private."""
    family, kind, protocol, _, address = info
    ip = ip_address(address[0].partition("%")[0])
    if not _is_public(ip):
        raise PermissionError(errno.EACCES, f"{ip} is a private address, which data may not name")
    return socket.socket(family, kind, protocol)


def _is_public(ip: IPv4Address | IPv6Address) -> bool:
    """Whether an address, and the one of IPv4 that it may stand for, belongs to no private network."""
    if isinstance(ip, IPv6Address):
        embeds = int(ip) >> 32 in (0, 0x64FF9B << 64)  # ::/96, and 64:ff9b::/96 of NAT64
        inner = ip.ipv4_mapped or ip.sixtofour or (IPv4Address(int(ip) & 0xFFFFFFFF) if embeds else None)
        if inner is not None or ip.is_site_local:
            return inner is not None and _is_public(inner)
    return ip.is_global and not ip.is_multicast


def _split(url: str) -> SplitResult:
    """Return the parts of an address that the user names.

    Raises:
        RecipeError: It has none.
    """
    try:
        return urlsplit(url)
    except ValueError as error:
        raise RecipeError(f"{shorten(url, 200)!r} is no address ({error}), expected http://… or https://…") from error


def _host(url: str) -> str:
    """Return the host and port of an address, without a login; nothing where there is none."""
    try:
        return urlsplit(url).netloc.rpartition("@")[2].lower()
    except ValueError:
        return ""


def _split_login(url: str) -> tuple[str, dict[str, str]]:
    """Return an address without its login, and the header that the login becomes."""
    parts = _split(url)
    login, _, host = parts.netloc.rpartition("@")
    if not login:
        return url, {}
    encoded = b64encode(unquote(login).encode()).decode()
    return parts._replace(netloc=host).geturl(), {"Authorization": f"Basic {encoded}"}


def _pause(failures: int) -> float:
    """Return the seconds to wait after so many failures: random, so that many clients do not come back at once."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10)) * (0.5 + random.random())
