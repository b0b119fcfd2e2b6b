"""Sources of prompts, as metrics name them; what reads a run without torch needs them, too."""

from __future__ import annotations

from functools import lru_cache

from rlkit.base.errors import shorten
from rlkit.base.text import safe
from rlkit.types import Prompt

MAX_SOURCES = 50
"""Most sources of prompts whose metrics are logged apart."""

LONGEST_NAME = 80
"""Characters of a source's or a component's name in metrics."""


@lru_cache(maxsize=256)
def metric_name(text: str) -> str:
    """Return the name of a source or a component as metrics have it."""
    return shorten(safe(text), LONGEST_NAME)


def source_of(prompt: Prompt) -> str:
    """Return the source of a prompt as metrics name it; empty if unknown."""
    return metric_name(prompt.source_name)
