"""Reading the pictures that rows hold or name: bytes, files, URLs and data URIs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rlkit.base.errors import explain, shorten
from rlkit.base.files import is_url, read_inside, relative_to
from rlkit.base.retry import ServiceError, fetch
from rlkit.base.text import redact
from rlkit.interfaces.picture import MAX_BYTES, Picture, from_base64

PROTOCOLS = ("http", "https", "s3", "gs", "gcs", "az", "abfs", "hf")
"""Protocols of URLs that rows may name; a row of a foreign data set could name anything."""

KEYS = ("bytes", "image", "image_url", "url", "path", "base64")
"""Keys of an object that holds a picture, in the order in which they are looked up."""

EXPECTED = "expected bytes, a path, a URL, or an object with bytes or path"

PUBLIC = "*"
"""The source that stands for all public addresses of the protocols `http` and `https`."""

FETCH_SECONDS = 30.0


def read_picture(value: object, folder: Path, sources: Sequence[str] = ()) -> Picture:
    """Return the picture that a row holds or names.

    Args:
        value: Bytes, an image of Pillow, a path, a URL, a data URI, or an object of `datasets`, verl or OpenAI's API
            that holds one of these under one of `KEYS`.
        folder: The folder of the row's file, to which paths are relative, and in which they must be.
        sources: Where else pictures may be: folders, and hosts such as `https://example.com`.

    Raises:
        ValueError: It is none of these, or cannot be read; the message says what it is.
    """
    if isinstance(value, Mapping):
        full = [key for key in KEYS if value.get(key) not in (None, "", b"")]
        if isinstance(value.get("image_url"), Mapping):
            return read_picture(value["image_url"].get("url"), folder, sources)
        if not full:
            raise ValueError(f"an object with the keys {', '.join(map(str, value)) or 'of none'}, {EXPECTED}")
        if full[0] == "base64":
            return from_base64(value["base64"])
        return read_picture(value[full[0]], folder, sources)
    if not isinstance(value, str) or value.startswith("data:"):
        return Picture.of(value)
    try:
        return Picture(_of_url(value, sources) if is_url(value) else _of_file(value, folder, sources))
    except (OSError, ServiceError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ValueError(f"{redact(shorten(value, 200))} cannot be read: {redact(shorten(reason, 300))}") from error


def _of_file(name: str, folder: Path, sources: Sequence[str]) -> bytes:
    """Read a regular file in a source, or in the folder, where no link leads to it."""
    path = folder / os.path.expanduser(name)
    target = Path(os.path.realpath(path))
    folders = [source for source in sources if not is_url(source) and source != PUBLIC]
    for source in (*folders, *(_caches() if os.path.isabs(name) else ())):
        source_folder = Path(os.path.realpath(os.path.expanduser(source)))
        inside = relative_to(source_folder, target)
        if inside is not None:
            return read_inside(source_folder, inside, MAX_BYTES)
    inside = relative_to(folder, path)
    if inside is None:
        raise ValueError(
            f"{redact(shorten(name, 200))} is outside of {folder.absolute()}, the folder of the rows; if you trust the "
            "rows, name its folder: --model.vision.sources='[FOLDER]'"
        )
    return read_inside(folder, inside, MAX_BYTES)


def _caches() -> Iterator[str]:
    """Yield the folders in which the hub's libraries keep the files of data sets."""
    from datasets import config
    from huggingface_hub import constants

    yield from (str(config.HF_DATASETS_CACHE), constants.HF_HUB_CACHE)


def _of_url(url: str, sources: Sequence[str]) -> bytes:
    """Read an address of one of `PROTOCOLS` that the user allows."""
    shown, named = redact(shorten(url, 200)), _host_of(url)
    protocol, _, host = named.partition("://")
    is_http = protocol in ("http", "https")
    is_chained = "::" in url and not is_http  # which fsspec takes for one URL within another
    if protocol not in PROTOCOLS or not host or is_chained:
        raise ValueError(f"{shown} has the protocol {protocol!r}, expected one of {', '.join(PROTOCOLS)} and a host")
    is_named = named in (_host_of(source) for source in sources if is_url(source))
    if not is_named and not (is_http and PUBLIC in sources):
        raise ValueError(
            f"{shown} is an address, and rows may name none that you do not allow; if you trust it: "
            f"--model.vision.sources='[{named}]'" + (", or '*' for all public addresses" if is_http else "")
        )
    return fetch(url, MAX_BYTES, FETCH_SECONDS, private=is_named) if is_http else _of_store(url)


def _host_of(url: str) -> str:
    """Return the protocol and the host of a URL, such as `https://example.com`, without a login."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2].lower()}"


def _of_store(url: str) -> bytes:
    """Read an object of a store, with the user's credentials."""
    import fsspec

    try:
        with fsspec.open(url, "rb") as file:
            data: bytes = file.read(MAX_BYTES + 1)  # which `Picture.decode` refuses
    except Exception as error:  # file systems have many errors of their own
        raise OSError(explain(error)) from error
    return data
