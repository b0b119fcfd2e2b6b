"""What a policy reads of rows: texts alone, or texts with pictures."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlkit.base.errors import RecipeError, show
from rlkit.data.picture_files import read_picture
from rlkit.interfaces.content import is_media, media_column, text_messages
from rlkit.interfaces.picture import Picture
from rlkit.interfaces.rows import INDEX, ROW, TASK, LocatedRow
from rlkit.types import JsonObject, Message, Prompt, Row

REMEDY = (
    "model.path names a model that reads text alone: choose a vision-language model, leave such rows out, or remove "
    "the media if the text is enough to answer"
)

MARKERS = {"<image>": "image", "<video>": "video"}
"""Texts in messages that stand for the next picture or video of the row, and the types of their parts."""

VIDEOS = ("video", "videos")
"""Columns of videos, each a list of frames."""


def text_only(prompt: Prompt, row: Row, location: str) -> Prompt:
    """Return the prompt with the text parts of its messages joined.

    `<image>` in a text stays as it is where the row holds no image: it may be plain text.

    Args:
        prompt: Of the row.
        row: With all its columns, those too that the task drops.
        location: Names the task and the row in messages.

    Raises:
        RecipeError: The row or the prompt holds an image, a video or audio, or a part of an unknown type.
    """
    columns = {**prompt.meta, **_columns(row)}
    column = media_column(columns)
    if column is not None:
        raise RecipeError(f"{location}: column {column!r} is {show(columns[column])}; {REMEDY}")
    try:
        messages = text_messages(prompt.messages)
        recorded = [replace(answer, messages=text_messages(answer.messages)) for answer in prompt.recorded]
    except ValueError as error:
        raise RecipeError(f"{location}: {error}; {REMEDY}") from error
    return replace(prompt, messages=messages, recorded=recorded)


def with_pictures(prompt: Prompt, row: Row, location: str, sources: Sequence[str] = ()) -> Prompt:
    """Return the prompt with its pictures in the typed parts of its messages, and without them in its meta data.

    `<image>` in a text, and a part `{"type": "image"}` without a value, stand for the next picture of the row's column;
    `<video>` for the frames of its next video. Without any of these, the pictures come before the first user's text.

    Args:
        prompt: Of the row.
        row: With all its columns, those too that the task drops.
        location: Names the task and the row in messages.
        sources: Where the row may name pictures, besides the folder of its file.

    Raises:
        RecipeError: A picture cannot be read, their number differs from that of the places for them, or a part or a
            column holds something else, such as audio.
    """
    columns = {**prompt.meta, **_columns(row)}
    try:
        pictures = _RowPictures(columns, _folder_of(row), sources)
        placed = any(map(_has_place, prompt.messages))
        messages = prompt.messages if placed else _with_places(prompt.messages, pictures)
        messages = [pictures.fill(message) for message in messages]
        recorded = [
            replace(answer, messages=[pictures.fill(message) for message in answer.messages])
            for answer in prompt.recorded
        ]
        pictures.check_used()
    except ValueError as error:
        raise RecipeError(f"{location}: {error}") from error
    meta = {name: value for name, value in prompt.meta.items() if name not in pictures.columns}
    return replace(prompt, messages=messages, recorded=recorded, meta=meta)


class _RowPictures:
    """The pictures of a row, which its messages take one after another.

    Raises:
        ValueError: A column holds audio, or several hold pictures.
    """

    def __init__(self, columns: Row, folder: Path, sources: Sequence[str]) -> None:
        self.columns = [name for name, value in columns.items() if is_media(name, value)]
        self._folder = folder
        self._sources = sources
        images = [name for name in self.columns if name not in VIDEOS]
        if len(images) > 1:
            raise ValueError(f"the columns {' and '.join(images)} hold pictures, expected one; leave the others out")
        if images and images[0].startswith("audio"):
            raise ValueError(f"column {images[0]!r} holds audio, which rlkit does not read; remove it")
        self._values = {
            "image": [(name, value) for name in images for value in _several(columns[name])],
            "video": [
                (name, value) for name in self.columns if name in VIDEOS for value in _videos(name, columns[name])
            ],
        }
        self._used = {"image": 0, "video": 0}
        self._are_placed = False  # by the task, which has read the columns itself

    def types(self) -> list[str]:
        """Return the types of all pictures and videos in the row's columns."""
        return [kind for kind, values in self._values.items() for _ in values]

    def fill(self, message: Message) -> Message:
        """Return a message with pictures in its places; one of text parts alone becomes a text.

        Raises:
            ValueError: There are fewer pictures than places, one cannot be read, or a part is of another type.
        """
        content = message.get("content")
        if not isinstance(content, str | list):
            return message
        if isinstance(content, str) and not any(mark in content and self._values[k] for mark, k in MARKERS.items()):
            return message  # in a row without pictures the markers are plain text
        try:
            parts = [part for piece in _parts_of(content) for part in self._filled(piece)]
        except ValueError as error:
            raise ValueError(f"message of role {message.get('role')!r}: {error}") from error
        if all(part["type"] == "text" for part in parts):
            return {**message, "content": "".join(part["text"] for part in parts)}
        return {**message, "content": parts}

    def check_used(self) -> None:
        """Check that each picture has its place, unless the task has placed pictures itself.

        Raises:
            ValueError: One has none.
        """
        for kind, values in self._values.items():
            if self._used[kind] < len(values) and not self._are_placed:
                raise ValueError(
                    f"the row has {len(values)} {kind}s in {values[0][0]!r}, but its messages have places for "
                    f"{self._used[kind]}; write <{kind}> where each belongs"
                )

    def _filled(self, part: JsonObject) -> list[JsonObject]:
        kind = "image" if part["type"] == "image_url" else part["type"]
        if kind == "text":
            return [part]
        if kind not in self._values:
            raise ValueError(f"a part is {show(part)}, expected one of the type text, image or video")
        own = {key: value for key, value in part.items() if key != "type" and value is not None}
        if own:
            self._are_placed = True
            name, value = "the message", own.get(kind, own) if kind == "video" else own
        else:
            name, value = self._next(kind)
        values = _frames(value) if kind == "video" else [value]
        return [{"type": "image", "image": self._read(frame, name)} for frame in values]

    def _next(self, kind: str) -> tuple[str, object]:
        values, index = self._values[kind], self._used[kind]
        if index >= len(values):
            raise ValueError(
                f"its messages have places for more than {len(values)} {kind}s, but the row has {len(values)}; add the "
                f"others to a column `{kind}s`, or remove <{kind}>"
            )
        self._used[kind] += 1
        return values[index]

    def _read(self, value: object, name: str) -> Picture:
        try:
            picture = read_picture(value, self._folder, self._sources)
            picture.check()
        except ValueError as error:
            raise ValueError(f"picture in {name!r}: {error}") from error
        return picture


def _columns(row: Row) -> Row:
    """Return the columns of a row, which may be one of a `Mix`."""
    while isinstance(row, Mapping) and row.keys() == {TASK, INDEX, ROW}:
        row = row[ROW]
    return row if isinstance(row, Mapping) else {}


def _folder_of(row: Row) -> Path:
    """Return the folder of the file that a row is from, or the folder itself; the current one for other rows.

    There is none for rows of the hub and of URLs: what is named after these does not exist.
    """
    row = _columns(row)
    name = row.location.rpartition(", ")[0] if isinstance(row, LocatedRow) else ""
    path = Path(name.rpartition(", split ")[0] or name)
    return path.parent if os.path.isfile(path) else path


def _several(value: object) -> list[object]:
    """Return the pictures of a column: one, or a list with or without nulls."""
    values = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return [element for element in values if is_media("image", element)]


def _videos(name: str, value: object) -> list[object]:
    """Return the videos of a column: those of `videos`, or the one of `video`, which is a list of frames itself."""
    if name == "videos" and isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [video for video in value if video is not None]
    return [value]


def _frames(video: object) -> list[object]:
    """Return the frames of a video.

    Raises:
        ValueError: It is no list of pictures.
    """
    frames = video.get("video") if isinstance(video, Mapping) else video
    if not isinstance(frames, Sequence) or isinstance(frames, str | bytes) or not frames:
        raise ValueError(
            f"a video is {show(frames)}, expected a list of its frames; rlkit reads no video files: extract frames, "
            "such as two a second, with ffmpeg"
        )
    return list(frames)


def _has_place(message: Message) -> bool:
    """Whether a message has a picture, or a place for one."""
    content = message.get("content")
    if isinstance(content, str):
        return any(marker in content for marker in MARKERS)
    parts = content if isinstance(content, list) else []
    return any(
        part.get("type") != "text" or any(marker in str(part.get("text")) for marker in MARKERS) for part in parts
    )


def _with_places(messages: list[Message], pictures: _RowPictures) -> list[Message]:
    """Return messages with places for all pictures of the row before the first user's text."""
    places: list[JsonObject] = [{"type": kind} for kind in pictures.types()]
    first = next((i for i, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None or not places:
        return messages
    content = [*places, *_parts_of(messages[first]["content"])]
    return [*messages[:first], {**messages[first], "content": content}, *messages[first + 1 :]]


def _parts_of(content: str | list[object]) -> Iterator[JsonObject]:
    """Yield the typed parts of a content, its markers as parts of their own.

    Raises:
        ValueError: A part has no type, or a text part no text.
    """
    if isinstance(content, str):
        for piece in re.split("(<image>|<video>)", content):
            if piece in MARKERS:
                yield {"type": MARKERS[piece]}
            elif piece:
                yield {"type": "text", "text": piece}
        return
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise ValueError(f"a part is {show(part)}, expected an object with a type: text, image or video")
        if part["type"] != "text":
            yield {key: value for key, value in part.items() if value is not None}
        elif isinstance(part.get("text"), str):
            yield from _parts_of(part["text"])
        else:
            raise ValueError(f"a part is {show(part)}, expected {{'type': 'text', 'text': ...}}")
