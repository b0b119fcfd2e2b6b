"""Sessions with servers: opened when needed, shared by all tools of a server, reopened if lost."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult
    from mcp.types import Tool as Description


@dataclass(frozen=True)
class Server:
    """How a server is reached: by a command that starts it, with variables for its environment, or at an address."""

    command: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    url: str | None = None

    def __str__(self) -> str:
        return self.url or " ".join(self.command)

    def client(self) -> Client:
        """Return a client that connects when it is entered."""
        from mcp import Client, StdioServerParameters, stdio_client

        if self.url is not None:
            return Client(self.url)
        command, *args = self.command
        return Client(stdio_client(StdioServerParameters(command=command, args=args, env=dict(self.env))))


class Connection:
    """One connection; the task that opens it also keeps and closes it, as the client's cancel scopes demand."""

    def __init__(self, server: Server, start_timeout: float) -> None:
        self._server = server
        self._opened: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._keeper = asyncio.create_task(self._keep(start_timeout))

    async def _keep(self, start_timeout: float) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(start_timeout):
                    client = await stack.enter_async_context(self._server.client())
                self._opened.set_result(client)
                await self._closing.wait()
        except Exception as error:  # a connection that breaks later tells its callers by their own requests
            if not self._opened.done():
                self._opened.set_exception(error)

    async def client(self) -> Client:
        """Wait until it is open.

        Raises:
            ConnectionError: It cannot be opened; the message says why.
        """
        try:
            return await asyncio.shield(self._opened)
        except Exception as error:
            raise ConnectionError(f"cannot connect to {self._server}: {_reason(error)}") from error

    async def close(self) -> None:
        """Close it; a server that it started is stopped."""
        self._closing.set()
        await asyncio.wait([self._keeper])  # a caller that is cancelled here does not cancel the keeper


class McpSession:
    """A connection that is opened again when it was lost; calls may come from any event loop.

    It runs in a thread with an event loop of its own, because a connection has to be served between steps too, when
    the trainer's loop does not run. `start_timeout` is in seconds, for the server to start and greet.
    """

    def __init__(self, server: Server, start_timeout: float) -> None:
        self.server = server
        self.start_timeout = start_timeout
        self.users = 0
        self._connection: Connection | None = None
        self._running = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name=f"mcp {server}", daemon=True)
        self._thread.start()
        self._running.wait()

    async def _live(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._closing = asyncio.Event()
        self._running.set()
        await self._closing.wait()
        if self._connection is not None:
            await self._connection.close()

    def tools(self) -> list[Description]:
        """Return the server's tools.

        Raises:
            ConnectionError: It cannot be reached, or does not answer.
        """
        return asyncio.run_coroutine_threadsafe(self._list(), self._loop).result()

    async def call(self, tool: str, arguments: dict[str, Any], retries: int, timeout: float) -> CallToolResult:
        """Call a tool; a call that is lost with its connection is made again on a new one.

        Raises:
            ConnectionError: The server cannot be reached, or each attempt was lost.
            TimeoutError: There is no answer in time.
            MCPError: The server refuses the call.
        """
        work = self._call(tool, arguments, retries, timeout)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def close(self) -> None:
        """Close the connection and end the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _current(self) -> Connection:
        if self._closing.is_set():
            raise ConnectionError(f"the session with {self.server} is closed")
        if self._connection is None:
            self._connection = Connection(self.server, self.start_timeout)
        return self._connection

    async def _list(self) -> list[Description]:
        from mcp import MCPError

        client = await self._current().client()
        found: list[Description] = []
        cursor = None
        try:
            async with asyncio.timeout(self.start_timeout):
                while True:
                    page = await client.list_tools(cursor=cursor)
                    found += page.tools
                    if (cursor := page.next_cursor) is None:
                        return found
        except (MCPError, TimeoutError) as error:
            raise ConnectionError(f"{self.server} does not list its tools: {_reason(error)}") from error

    async def _call(self, tool: str, arguments: dict[str, Any], retries: int, timeout: float) -> CallToolResult:
        from mcp import MCPError

        failure: Exception | None = None
        try:
            async with asyncio.timeout(timeout):
                for attempt in range(retries + 1):
                    connection = self._current()
                    try:
                        return await (await connection.client()).call_tool(tool, arguments)
                    except (MCPError, ConnectionError) as error:
                        if isinstance(error, MCPError) and not self._is_loss(error):
                            raise
                        failure = error
                    await self._forget(connection)
                    if attempt < retries:
                        await asyncio.sleep(0.2 * 2**attempt)
        except TimeoutError as error:
            why = f": {failure}" if failure else ""
            raise TimeoutError(f"{self.server} gave no answer to {tool} within {timeout:.3g} s{why}") from error
        raise ConnectionError(f"{self.server} was lost during {tool}, {retries + 1} times: {failure}") from failure

    def _is_loss(self, error: Any) -> bool:
        """Whether it says that the connection is gone, or that a server at an address no longer knows the session."""
        from mcp.types import CONNECTION_CLOSED, INVALID_REQUEST

        return error.code == CONNECTION_CLOSED or (error.code == INVALID_REQUEST and self.server.url is not None)

    async def _forget(self, connection: Connection) -> None:
        """Close a lost connection, unless another call has done so."""
        if self._connection is connection:
            self._connection = None
            await connection.close()


_shared: dict[Server, McpSession] = {}


def acquire(server: Server, start_timeout: float) -> McpSession:
    """Return this process's session with a server; `release` it afterwards."""
    if server not in _shared:
        _shared[server] = McpSession(server, start_timeout)
    _shared[server].users += 1
    return _shared[server]


def release(session: McpSession) -> None:
    """Release a session; the last release closes it."""
    session.users -= 1
    if session.users == 0:
        del _shared[session.server]
        session.close()


def _reason(error: BaseException) -> str:
    """Return the message of the first error inside groups of errors."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
