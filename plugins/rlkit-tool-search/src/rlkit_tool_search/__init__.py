"""A search tool: BM25 over a local corpus, in the trainer's process or behind HTTP."""

from __future__ import annotations

from collections.abc import Callable

from rlkit import hookimpl
from rlkit.interfaces.tool import Tool
from rlkit_tool_search.index import Index, Passage, open_index
from rlkit_tool_search.server import SearchServer
from rlkit_tool_search.tool import SearchTool

__all__ = ["Index", "Passage", "SearchServer", "SearchTool", "open_index"]


@hookimpl
def rlkit_register_tools(register: Callable[[type[Tool]], None]) -> None:
    register(SearchTool)
