"""Reading the pictures that rows hold or name: bytes, files, URLs and data URIs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rlkit.base.errors import RecipeError, explain, shorten, show
from rlkit.base.text import redact
from rlkit.interfaces.picture import MAX_BYTES, Picture, from_base64
from rlkit.tasks.lines import is_url
from rlkit.tasks.sources import regular

PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "hf")
"""Protocols of URLs that rows may name; a row of a foreign data set could name anything."""

KEYS = ("bytes", "image", "image_url", "url", "path", "base64")
"""Keys of an object that holds a picture, in the order in which they are looked up."""

EXPECTED = "expected bytes, a path, a URL, or an object with bytes or path"


def read_picture(value: object, folder: Path) -> Picture:
    """Return the picture that a row holds or names.

    Args:
        value: Bytes, an image of Pillow, a path, a URL, a data URI, or an object of `datasets`, verl or OpenAI's API
            that holds one of these under one of `KEYS`.
        folder: The folder of the row's file, to which paths are relative.

    Raises:
        ValueError: It is none of these, or cannot be read; the message says what it is.
    """
    if isinstance(value, Mapping):
        full = [key for key in KEYS if value.get(key) not in (None, "", b"")]
        if isinstance(value.get("image_url"), Mapping):
            return read_picture(value["image_url"].get("url"), folder)
        if not full:
            raise ValueError(f"an object with the keys {', '.join(map(str, value)) or 'of none'}, {EXPECTED}")
        return from_base64(value["base64"]) if full[0] == "base64" else read_picture(value[full[0]], folder)
    if not isinstance(value, str) or value.startswith("data:"):
        return Picture.of(value)
    try:
        return Picture(_of_url(value) if is_url(value) else _of_file(value, folder))
    except (OSError, RecipeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{redact(shorten(value, 200))} cannot be read: {redact(shorten(reason, 300))}") from error


def _of_file(name: str, folder: Path) -> bytes:
    """Read a regular file."""
    path = Path(os.path.expanduser(name))
    path = path if path.is_absolute() else folder / path
    with regular(path, "the picture").open("rb") as file:
        return file.read(MAX_BYTES + 1)  # which `Picture.decode` refuses


def _of_url(url: str) -> bytes:
    """Read a URL of one of `PROTOCOLS`."""
    import fsspec

    protocol = urlsplit(url).scheme
    if protocol not in PROTOCOLS or "::" in url:
        raise ValueError(f"{show(url)} has the protocol {protocol!r}, expected one of {', '.join(PROTOCOLS)}")
    try:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)
    except Exception as error:  # file systems have many errors of their own
        raise OSError(explain(error)) from error
    return data
