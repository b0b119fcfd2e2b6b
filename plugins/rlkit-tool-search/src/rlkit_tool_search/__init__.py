"""A search tool: BM25 over a local corpus, in the trainer's process or behind HTTP."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_tool_search.index import Index, Passage, open_index
from rlkit_tool_search.server import SearchServer
from rlkit_tool_search.tool import SearchTool

__all__ = ["Index", "Passage", "SearchServer", "SearchTool", "open_index"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(SearchTool)
