"""Tools from any Model Context Protocol server."""

from __future__ import annotations

from collections.abc import Callable

from rlkit import hookimpl
from rlkit.interfaces.tool import Tool
from rlkit_tool_mcp.tool import McpTool, ToolError

__all__ = ["McpTool", "ToolError"]


@hookimpl
def rlkit_register_tools(register: Callable[[type[Tool]], None]) -> None:
    register(McpTool)
