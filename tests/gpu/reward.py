"""A reward that varies among the samples of any model, a random one too, whose tokens may have no text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def even_tokens(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Return the share of even ids in each completion."""
    return [sum(token % 2 == 0 for token in ids) / max(len(ids), 1) for ids in completion_ids]
