"""Refusal of what a policy cannot read: images, videos and audio."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.content import media_column, text_messages
from rlkit.tasks.mix import INDEX, ROW, TASK
from rlkit.types import Prompt, Row

REMEDY = "rlkit trains on text alone: leave such rows out, or remove the media if the text is enough to answer"


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
    while isinstance(row, Mapping) and row.keys() == {TASK, INDEX, ROW}:  # of a `Mix`
        row = row[ROW]
    columns = {**prompt.meta, **(row if isinstance(row, Mapping) else {})}
    column = media_column(columns)
    if column is not None:
        raise RecipeError(f"{location}: column {column!r} is {show(columns[column])}; {REMEDY}")
    try:
        messages = text_messages(prompt.messages)
        recorded = [replace(answer, messages=text_messages(answer.messages)) for answer in prompt.recorded]
    except ValueError as error:
        raise RecipeError(f"{location}: {error}; {REMEDY}") from error
    return replace(prompt, messages=messages, recorded=recorded)
