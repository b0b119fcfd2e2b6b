"""Images, videos, audio and parts of unknown types, which are refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rlkit_tasks.rows import Rows

from rlkit.base.errors import RecipeError
from rlkit.data.prompts import make_prompt
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.task import Split, Task
from rlkit.interfaces.tool import State
from rlkit.rollout.participants import ParticipantError, _content, _messages
from rlkit.tasks import TRL, Mix, Verl
from rlkit.types import Message, Prompt, Row

PIXEL = {"bytes": b"\x89PNG", "path": None}
MEDIA: list[tuple[Row, str]] = [
    ({"images": [PIXEL]}, "images"),
    ({"images": ["cat.png"]}, "images"),
    ({"image": "https://example.org/cat.png"}, "image"),
    ({"videos": [{"video": "cat.mp4"}]}, "videos"),
    ({"audio": {"array": [0.0], "sampling_rate": 16000, "path": None}}, "audio"),
    ({"picture": PIXEL}, "picture"),
    ({"scan": [None, {"bytes": None, "path": "a.png"}]}, "scan"),
]


@pytest.mark.parametrize(("columns", "name"), MEDIA)
@pytest.mark.parametrize("task", [Verl, TRL])
def test_rows_with_media_are_refused_by_row_and_column(columns: Row, name: str, task: type[Task]) -> None:
    row = {"prompt": [{"role": "user", "content": "<image> How many?"}], **columns}
    with pytest.raises(RecipeError, match=rf"task {task.__name__}, row 3: column '{name}' is"):
        make_prompt(task("unread.parquet"), [row] * 4, 3)  # type: ignore[call-arg]


@pytest.mark.parametrize("empty", [None, [], "", float("nan"), {"bytes": None, "path": None}, [None]])
def test_columns_without_media_are_no_media(empty: object) -> None:
    row = {"prompt": "<image> is a tag of SVG", "answer": "yes", "images": empty}
    assert make_prompt(Rows([row]), [row], 0).messages[0]["content"] == "<image> is a tag of SVG"


PARTS: list[Any] = [
    {"type": "image"},
    {"type": "image_url", "image_url": {"url": "a"}},
    {"type": "text"},
    {"type": "text", "text": 5},
    {"type": "text", "text": "a", "detail": "high"},
    {"type": "thinking", "text": "a"},
]


@pytest.mark.parametrize("part", PARTS)
def test_parts_that_are_no_text_are_refused(part: Row) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "What?"}, part]}]
    with pytest.raises(RecipeError, match=r"row 0: message 1 \(user\): part 2 of the content is"):
        make_prompt(Rows([]), [{"prompt": messages}], 0)
    answered = [{"role": "user", "content": "a"}, {"role": "assistant", "content": messages[0]["content"]}]
    with pytest.raises(RecipeError, match=r"row 0: message 1 \(assistant\): part 2"):
        make_prompt(Rows([]), [{"messages": answered}], 0)


def test_parts_of_text_are_joined_without_the_nulls_of_tables() -> None:
    parts = [{"type": "text", "text": "2 + ", "image": None}, {"type": "text", "text": "3"}]
    row = {"prompt": [{"role": "user", "content": parts}], "completion": [{"role": "assistant", "content": parts[1:]}]}
    prompt = make_prompt(Rows([]), [row], 0)
    assert prompt.messages == [{"role": "user", "content": "2 + 3"}]
    assert prompt.recorded[0].messages == [{"role": "assistant", "content": "3"}]


class Dropping(Task):
    """Takes the question alone, whatever else is in the row."""

    def rows(self, split: Split) -> Sequence[Row]:
        return [{"question": "What is it?", "images": ["cat.png"]}]

    def prompt(self, row: Row, index: int) -> Prompt:
        return Prompt("0", [{"role": "user", "content": row["question"]}])


def test_media_that_a_task_drops_are_refused_too() -> None:
    for task in (Dropping(), Mix({"cats": Dropping()})):
        with pytest.raises(RecipeError, match="column 'images'"):
            make_prompt(task, task.rows("train"), 0)


@pytest.mark.parametrize("value", ["a", 5, ["a"], [{"type": "text", "text": "a"}]])
def test_what_participants_return_is_text(value: Any) -> None:
    assert _content(value, pictures=False) == (
        "a" if isinstance(value, list) and isinstance(value[0], dict) else str(value)
    )


class Painter(Interaction):
    """Replies with an image."""

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        raise NotImplementedError


def test_typed_parts_of_participants_are_refused() -> None:
    image = [{"type": "image", "image": "a"}]
    with pytest.raises(ValueError, match="part 1"):
        _content(image, pictures=False)
    with pytest.raises(ParticipantError, match="Painter.*part 1"):
        _messages(Painter(), [{"role": "user", "content": image}], pictures=False)


def test_features_of_media_are_refused_without_their_decoders(tmp_path: Path) -> None:
    import datasets

    rows = {"prompt": ["a", "b"], "photo": [None, PIXEL]}
    features = datasets.Features({"prompt": datasets.Value("string"), "photo": datasets.Image()})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "t")
    task = TRL(str(tmp_path / "t"))
    assert make_prompt(task, task.rows("train"), 0).messages[0]["content"] == "a"
    with pytest.raises(RecipeError, match=r"t, row 2: column 'photo'"):
        make_prompt(task, task.rows("train"), 1)
