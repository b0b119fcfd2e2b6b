"""The tool that the policy calls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import NUMBER, PositiveInt, Repeats, Seconds
from rlkit.interfaces.runtime import Runtime
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit_tool_search.client import SearchClient
from rlkit_tool_search.index import Index, Passage, open_index
from rlkit_tool_search.server import LARGEST_TOP_K


class SearchTool(Tool):
    """Finds passages of a corpus by BM25 (Robertson and Zaragoza 2009), as in Search-R1 (arXiv:2503.09516).

    Args:
        corpus: JSON lines with `id`, `title` and `text`, searched in this process.
        url: A search server, instead of a corpus.
        top_k: Passages of one answer, at most.
        max_chars: Where each passage's text is cut, in characters.
        description: What the policy is told of the tool.
        retries: Further attempts after a failed request to the server, with growing pauses.
        timeout: Seconds for one call; the attempts of a client end a tenth earlier, so that the error has the reason.
    """

    name = "search"

    def __init__(
        self,
        corpus: str | None = None,
        url: str | None = None,
        *,
        top_k: Annotated[int, Ge(1), Le(LARGEST_TOP_K), NUMBER] = 3,
        max_chars: PositiveInt = 1000,
        description: str = "Searches a collection of documents and gives the passages that fit the query best.",
        retries: Repeats = 5,
        timeout: Seconds = 30.0,
    ) -> None:
        if (corpus is None) == (url is None):
            raise RecipeError(f"SearchTool has corpus={corpus!r} and url={url!r}, expected exactly one of the two")
        if url is not None and not url.startswith(("http://", "https://")):
            raise RecipeError(f"SearchTool has url={url!r}, expected http://… or https://…")
        self.corpus = corpus
        self.top_k = top_k
        self.max_chars = max_chars
        self.description = description
        self.timeout = timeout
        self.client = None if url is None else SearchClient(url, retries, 0.9 * timeout)
        self.index: Index | None = None
        self.parameters = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "The words to search for."}},
            "required": ["query"],
        }

    def files(self) -> list[tuple[str, str]]:
        return [] if self.corpus is None else [("corpus", self.corpus)]

    def bind(self, runtime: Runtime) -> None:
        if self.client is not None:
            self.client.check()
        elif self.corpus is not None:
            self.index = open_index(Path(self.corpus))

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> ToolReply | str:
        return render(await self._search(arguments["query"]), self.max_chars)

    async def _search(self, query: str) -> list[Passage]:
        if self.client is not None:
            return await self.client.search(query, self.top_k)
        if self.index is None:
            raise RuntimeError("SearchTool was called before `bind`")
        return await asyncio.to_thread(self.index.search, query, self.top_k)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()
        if self.index is not None:
            self.index.close()


def render(passages: Sequence[Passage], max_chars: int) -> str:
    """Return the passages as the policy reads them: numbered, with their titles, cut between words."""
    if not passages:
        return "Nothing found."
    return "\n\n".join(f"[{i}] {p.title}\n{cut(p.text, max_chars)}" for i, p in enumerate(passages, 1))


def cut(text: str, max_chars: int) -> str:
    """Return at most so many characters of the text, whole words if there are any, and `…` where it goes on."""
    text = text.strip()
    if len(text) <= max_chars:
        return text
    head = text[:max_chars]
    between_words = head[-1].isspace() or text[max_chars].isspace()
    return f"{head.rstrip() if between_words else head.rsplit(maxsplit=1)[0]}…"
