"""The pictures of a run's rollouts, for a page that opens without a network."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from rlkit.base.files import read_inside
from rlkit.types import JsonObject
from rlkit_report.files import samples_of

NAME = re.compile(r"media/[0-9a-f]{32}\.(png|jpg|gif|webp|bmp)")
"""Names of pictures, as a run writes them: a row may have been edited, and names no other file."""

MAX_BYTES = 1 << 26
"""Bytes of the pictures of a page in all; further ones are named only."""


class RunPictures:
    """Reads the pictures of a run's rollouts.

    Args:
        folder: `rollouts/` of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._bytes = 0

    def of(self, row: JsonObject) -> dict[str, str]:
        """Return the pictures of a row as data URIs, by their names, without those that are missing or too many."""
        pictures = {}
        for name in dict.fromkeys(_names(row)):
            kind = NAME.fullmatch(name)
            if kind is None:
                continue
            with suppress(OSError):  # it is missing, or too large for what the page may hold
                data = read_inside(self._folder, name, MAX_BYTES - self._bytes)
                self._bytes += len(data)
                content = b64encode(data).decode()
                pictures[name] = f"data:image/{kind.group(1).replace('jpg', 'jpeg')};base64,{content}"
        return pictures


def _names(row: JsonObject) -> Iterator[str]:
    """Yield the names of the pictures in a row's messages, whatever else these hold."""
    conversations = (sample.get("conversation") for sample in samples_of(row))
    for messages in (row.get("messages"), *conversations):
        for message in messages if isinstance(messages, list) else ():
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and isinstance(part.get("image"), str):
                    yield part["image"]
