"""Tools from any Model Context Protocol server."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_tool_mcp.tool import McpTool, ToolError

__all__ = ["McpTool", "ToolError"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(McpTool)
