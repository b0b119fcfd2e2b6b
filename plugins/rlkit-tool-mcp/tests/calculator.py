"""The MCP server of the tests: over standard input and output, or over HTTP at the port that it is given."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("calculator", log_level="CRITICAL")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two whole numbers."""
    return a + b


@server.tool()
def divide(a: int, b: int) -> float:
    """Divides."""
    if b == 0:
        raise ToolError("no number divides by 0")
    return a / b


@server.tool()
async def sleep(seconds: float) -> str:
    """Takes its time."""
    await asyncio.sleep(seconds)
    return "slept"


@server.tool()
def process() -> str:
    """Tells the server's process and an environment variable."""
    return f"{os.getpid()} {os.environ.get('FLAVOUR', '-')}"


@server.tool()
def crash() -> str:
    """Takes the server down."""
    os._exit(1)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
