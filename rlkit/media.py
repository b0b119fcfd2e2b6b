"""What rows and messages may hold: text. Images, video and audio are found here, and refused where they come in."""

from __future__ import annotations

from collections.abc import Mapping

MEDIA_COLUMNS = frozenset(("image", "images", "video", "videos", "audio", "audios"))
"""Columns under which data sets have media; empty ones are no matter."""
MEDIA_KEYS = ({"bytes", "path"}, {"array", "sampling_rate"})
"""The keys of media in tables of `datasets`: an encoded file, decoded audio."""
MEDIA_PACKAGES = ("PIL", "torchcodec", "soundfile")
"""The packages of the objects that `datasets` makes of such files."""


def media_in(row: Mapping[str, object]) -> str | None:
    """Return which column of a row holds media, and what; None for a row of text."""
    for column, value in row.items():
        kind = _media(value)
        if kind is None and column in MEDIA_COLUMNS and not _is_empty(value):
            kind = type(value).__name__
        if kind is not None:
            return f"column {column!r} holds media ({kind})"
    return None


def joined(content: object) -> object:
    """Return the text of typed parts, if all are text; any other content as it is."""
    if isinstance(content, list) and content and all(isinstance(part, Mapping) for part in content):
        texts = [part.get("text") for part in content if part.get("type") == "text"]
        if len(texts) == len(content) and all(isinstance(text, str) for text in texts):
            return "".join(map(str, texts))
    return content


def _media(value: object) -> str | None:
    """Return what kind of media a value is, or has in it; None for data and text."""
    if isinstance(value, bytes | bytearray):
        return "bytes"
    if type(value).__module__.partition(".")[0] in MEDIA_PACKAGES:
        return type(value).__name__
    if isinstance(value, Mapping):
        if any(keys <= value.keys() for keys in MEDIA_KEYS):
            return "a file" if "bytes" in value else "audio"
        content = value.get("content")
        if "role" in value and isinstance(content, list):
            return _part_beside_text(content)
        return None
    if isinstance(value, list | tuple):
        return next((kind for kind in map(_media, value) if kind is not None), None)
    return None


def _part_beside_text(content: list[object]) -> str | None:
    """Return the type of the first part of a message that is no text."""
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            return f"a part of type {kind!r}"
    return None


def _is_empty(value: object) -> bool:
    return value is None or value is False or (hasattr(value, "__len__") and len(value) == 0)
