"""Contents of messages with pictures, as both providers' dialects write them: data alone, no addresses or files."""

from __future__ import annotations

from rlkit.interfaces.picture import Picture, from_base64
from rlkit.types import JsonObject
from rlkit_agents.body import of_type, text_of
from rlkit_agents.request import RequestError

KINDS = ("image_url", "input_image", "image")
"""Types of parts with a picture: of chat completions, of responses and of messages."""


def content_of(content: object, what: str) -> str | list[JsonObject]:
    """Return a content as chat templates read it: a text, or typed parts if it holds pictures; texts in a row are one.

    Raises:
        RequestError: It is no content, or a picture is none, is too large or no data.
    """
    if not isinstance(content, list) or not any(map(_is_picture, content)):
        return text_of(content, what)
    parts: list[JsonObject] = []
    for part in content:
        if _is_picture(part):
            parts.append({"type": "image", "image": _picture(part, what)})
            continue
        text = text_of([part], what)
        if parts and parts[-1]["type"] == "text":
            text = parts.pop()["text"] + text
        parts.append({"type": "text", "text": text})
    return parts


def _is_picture(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") in KINDS


def _picture(part: JsonObject, what: str) -> Picture:
    if isinstance(part.get("image"), Picture):  # of a function in this process; JSON holds none
        return Picture.of(part["image"])
    source = part.get("source") if part["type"] == "image" else part.get("image_url")
    if isinstance(source, dict):
        source = source.get("data") if source.get("type") == "base64" else source.get("url")
    text = of_type(source, str, f"the data of a part of type {part['type']!r} in {what}")
    try:
        picture = from_base64(text) if part["type"] == "image" and ":" not in text else Picture.of(text)
        picture.check()
    except ValueError as error:
        raise RequestError(f"{what} has a picture that is not read: {error}; send its data in base64") from error
    return picture
