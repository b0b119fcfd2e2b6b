"""Calls of PythonTool, as tests make them."""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path

from rlkit_tool_python import PythonTool


def bound(**options) -> PythonTool:
    """Return a tool that is ready, whatever this machine enforces."""
    tool = PythonTool(**{"timeout": 60, "memory_mb": 512, "processes": 8, "file_mb": 4, "strict": False, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tool.bind(None)
    return tool


def run(code: str, tool: PythonTool | None = None, **options) -> str:
    """Return the answer to one call; check that none of its processes is left."""
    own = tool or bound(**options)

    async def conversation() -> str:
        state: dict = {}
        await own.create(state)
        try:
            return await own.call({"code": code}, state)
        finally:
            assert not left_of(state["folder"])
            await own.release(state)

    try:
        return asyncio.run(conversation())
    finally:
        if tool is None:
            own.close()


def left_of(folder: str) -> list[str]:
    """Return the living processes that have a conversation's folder for their home."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={folder}".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found
