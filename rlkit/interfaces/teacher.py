"""The interface of a teacher on servers: log-probs of given tokens, and the most likely tokens at each position.

All log-probs are of the plain distribution (temperature 1).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple


class TokenSpan(NamedTuple):
    """A row of tokens to score from an index on.

    Args:
        tokens: Ids of the row.
        start: Index of the first token to score; at least 1, since nothing predicts token 0.
    """

    tokens: list[int]
    start: int


class TopTokens(NamedTuple):
    """The most likely tokens at one position.

    Args:
        ids: Ids of the tokens, the most likely first.
        logps: Their log-probs.
    """

    ids: list[int]
    logps: list[float]


class ServedTeacher(ABC):
    """A teacher that servers hold, so that it takes no memory in the trainer's processes."""

    @abstractmethod
    async def logps(self, spans: Sequence[TokenSpan]) -> list[list[float]]:
        """Return the log-prob of each span's tokens from its start on.

        Raises:
            EngineError: A server refused a request, or none answered it in time.
        """

    @abstractmethod
    async def top_logps(self, spans: Sequence[TokenSpan], count: int) -> list[list[TopTokens]]:
        """Return the `count` most likely tokens at each position of each span, from its start on.

        Raises:
            EngineError: A server refused a request, or none answered it in time.
        """
