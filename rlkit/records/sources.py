"""Sources of prompts, as metrics name them; what reads a run without torch needs them, too."""

from __future__ import annotations

from rlkit.base.errors import shorten
from rlkit.base.text import safe
from rlkit.types import Prompt

MAX_SOURCES = 50
"""Most sources of prompts whose metrics are logged apart."""

LONGEST_NAME = 80
"""Characters of a source's or a component's name in metrics."""


def source_of(prompt: Prompt) -> str:
    """Return the source of a prompt as metrics name it; empty if unknown."""
    return shorten(safe(prompt.source_name), LONGEST_NAME)
