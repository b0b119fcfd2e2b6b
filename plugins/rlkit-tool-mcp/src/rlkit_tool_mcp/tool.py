"""One tool of a Model Context Protocol server, as the policy calls it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import Count, Repeats, Seconds
from rlkit.interfaces.runtime import Runtime
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit_tool_mcp.session import McpSession, Server, acquire, release

if TYPE_CHECKING:
    from mcp.types import Tool as Description


class ToolError(Exception):
    """What the server answered instead of a result, in its own words."""


class McpTool(Tool):
    """A tool of a Model Context Protocol server (modelcontextprotocol.io), described as the server describes it.

    Tools with the same `command` and `env`, or the same `url`, share one session with the server, and so do all
    conversations. A call that is lost with its connection is made again, so it may have been carried out twice.

    Args:
        tool: Its name on the server.
        command: A command line that starts a server, which is then spoken to over its standard input and output.
        env: Variables for its environment, which otherwise has PATH, HOME and a few more.
        url: The address of a server that is running (streamable HTTP), instead of a command.
        retries: How often a lost call is made again, with growing pauses.
        start_timeout: Seconds for the server to start and greet.
        timeout: Seconds for one call; the server's time ends a tenth earlier, so that the error has the reason.
        concurrency: How many calls may run at once; null for any number.
    """

    def __init__(
        self,
        tool: str,
        command: list[str] | None = None,
        env: dict[str, str] | None = None,
        *,
        url: str | None = None,
        retries: Repeats = 3,
        start_timeout: Seconds = 60.0,
        timeout: Seconds = 30.0,
        concurrency: Count | None = None,
    ) -> None:
        if bool(command) == bool(url) or (url and env):
            raise RecipeError(
                f"McpTool {tool!r} has command={command!r}, env={env and sorted(env)} and url={url!r}, "
                "expected a command (and env, if need be) or a url"
            )
        if url and not url.startswith(("http://", "https://")):
            raise RecipeError(f"McpTool {tool!r} has url={url!r}, expected http://… or https://…")
        self.name = self._tool = tool
        self.server = Server(tuple(command or ()), tuple(sorted((env or {}).items())), url)
        self.retries = retries
        self.start_timeout = start_timeout
        self.timeout = timeout
        self.concurrency = concurrency
        self._session: McpSession | None = None

    def bind(self, runtime: Runtime) -> None:
        session = acquire(self.server, self.start_timeout)
        try:
            described = find(self._tool, session.tools(), self.server)
        except BaseException as error:
            release(session)
            if isinstance(error, ConnectionError):
                raise RecipeError(f"McpTool {self._tool!r}: {error}; start the server by hand to see why") from error
            raise
        self._session = session
        self.description = described.description or ""
        self.parameters = described.input_schema

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> ToolReply | str:
        if self._session is None:
            raise RuntimeError(f"McpTool {self._tool!r} was called before `bind` or after `close`")
        result = await self._session.call(self._tool, arguments, self.retries, 0.9 * self.timeout)
        text = "\n".join(as_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(text)
        return text

    def close(self) -> None:
        if self._session is not None:
            release(self._session)
            self._session = None


def find(name: str, described: Sequence[Description], server: Server) -> Description:
    """Return the description of a tool.

    Raises:
        RecipeError: The server does not offer it; the message says what it does.
    """
    known = {tool.name: tool for tool in described}
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise RecipeError(f"the MCP server {server} has no tool {name!r}, it has: {', '.join(known) or '(none)'}{hint}")
    return known[name]


def as_text(block: Any) -> str:
    """Return a block of an answer as text; what is not text is named by its type, such as `[image]`."""
    if block.type == "resource":
        return getattr(block.resource, "text", f"[{block.type}]")
    return block.text if block.type == "text" else f"[{block.type}]"
