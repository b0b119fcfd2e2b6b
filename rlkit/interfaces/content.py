"""What a policy reads of messages and rows: texts, and pictures if its model reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rlkit.base.errors import show
from rlkit.interfaces.picture import Picture
from rlkit.types import JsonObject, Message, Row

MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios")
"""Columns that hold media under these names, as paths and URLs too."""

MEDIA_MODULES = ("PIL", "torchcodec", "torchvision")
"""Packages whose objects `datasets` decodes media into."""

FILE_KEYS = ({"bytes", "path"}, {"array", "sampling_rate"})
"""Keys of the objects in which `datasets` holds media."""


def text_of(content: object) -> object:
    """Return a message's content with its parts joined, if it is a list of parts `{type: text, text: ...}`.

    Any other content is returned as it is.

    Raises:
        ValueError: A part is not text; the message says what it is.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for number, part in enumerate(content, 1):
        text = part.get("text") if isinstance(part, Mapping) else None
        keys = {key for key, value in part.items() if value is not None} if isinstance(part, Mapping) else set()
        if keys != {"type", "text"} or part["type"] != "text" or not isinstance(text, str):
            raise ValueError(f"part {number} of the content is {show(part)}, expected {{'type': 'text', 'text': ...}}")
        texts.append(text)
    return "".join(texts)


def content_of(content: object, pictures: bool) -> object:
    """Return a message's content as the policy reads it: a text, or typed parts if it holds pictures.

    Args:
        content: A text, or a list of parts `{type: text, text: ...}` and `{type: image, image: ...}`, with the bytes of
            a picture, an image of Pillow or a data URI. Anything else is returned as it is.
        pictures: Whether the policy reads pictures.

    Raises:
        ValueError: A part is neither, or the policy does not read it; the message says what it is.
    """
    has_pictures = isinstance(content, list) and any(
        isinstance(part, Mapping) and part.get("type") == "image" for part in content
    )
    if not (pictures and has_pictures and isinstance(content, list)):
        return text_of(content)
    parts: list[JsonObject] = []
    for number, part in enumerate(content, 1):
        if isinstance(part, Mapping) and part.get("type") == "image":
            picture = Picture.of(part.get("image"))
            picture.check()
            parts.append({"type": "image", "image": picture})
        else:
            try:
                parts.append({"type": "text", "text": text_of([part])})
            except ValueError as error:
                raise ValueError(str(error).replace("part 1", f"part {number}", 1)) from error
    return parts


def described(content: object) -> object:
    """Return the text of a content of typed parts, with `[picture]` for each picture; any other content as it is."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, Mapping)]
    return "".join(str(part.get("text", "[picture]" if "image" in part else "")) for part in parts)


def json_messages(messages: Iterable[Message]) -> list[Message]:
    """Return messages as JSON data: pictures are data URIs."""
    return [{**message, "content": json_content(message.get("content"))} for message in messages]


def json_content(content: object) -> object:
    """Return a message's content as JSON data: pictures, also bytes and images of Pillow, are data URIs.

    Raises:
        ValueError: A part is said to be a picture, and is none.
    """
    if not isinstance(content, list):
        return content
    pictures = [isinstance(part, Mapping) and part.get("type") == "image" for part in content]
    return [
        {**part, "image": Picture.of(part.get("image")).data_uri} if is_picture else part
        for part, is_picture in zip(content, pictures, strict=True)
    ]


def text_messages(messages: Iterable[Message]) -> list[Message]:
    """Return messages, each with its content as `text_of` returns it.

    Raises:
        ValueError: A part of a message is not text; the message says which.
    """
    texts: list[Message] = []
    for number, message in enumerate(messages, 1):
        try:
            content = text_of(message.get("content"))
        except ValueError as error:
            raise ValueError(f"message {number} ({message.get('role')}): {error}") from error
        texts.append({**message, "content": content} if isinstance(message.get("content"), list) else message)
    return texts


def media_column(row: Row) -> str | None:
    """Return the name of the first column of a row that holds an image, a video or audio; None if none does.

    Null and empty values are none.
    """
    return next((name for name, value in row.items() if is_media(name, value)), None)


def is_media(name: str, value: object) -> bool:
    """Whether a column of this name holds an image, a video or audio with this value."""
    return _holds_media(value, name in MEDIA_COLUMNS)


def _holds_media(value: object, named: bool) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return any(_holds_media(element, named) for element in value)
    if isinstance(value, Mapping):
        full = {key for key, element in value.items() if element is not None}
        return bool(full) and (named or any(full <= keys <= value.keys() for keys in FILE_KEYS))
    if type(value).__module__.partition(".")[0] in MEDIA_MODULES:
        return True
    return named and value is not None and value == value and value not in ("", b"")  # noqa: PLR0124 (not NaN)


def are_tools(tools: object) -> bool:
    """Whether it is a list of a prompt's tools: names, and schemas in OpenAI's form."""
    return isinstance(tools, list) and all(map(_is_tool, tools))


def _is_tool(tool: object) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(tool, str) or (isinstance(function, Mapping) and isinstance(function.get("name"), str))


def pictures_of(messages: Sequence[Message]) -> list[Picture]:
    """Return the pictures in messages, in the order in which they are rendered."""
    contents = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    return [part["image"] for content in contents for part in content if part.get("type") == "image"]
