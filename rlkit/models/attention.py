"""The implementation by which a model attends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WITH_MASKS = {"sdpa", "eager"}
"""Implementations that read a mask of every query and key: on any device, and in any type."""


@contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """Let a model attend by SDPA, or eagerly, in this context, if its own implementation reads no masks."""
    config = model.config.get_text_config()
    chosen = config._attn_implementation
    if chosen not in WITH_MASKS:
        config._attn_implementation = "sdpa" if model._supports_sdpa else "eager"
    try:
        yield
    finally:
        config._attn_implementation = chosen
