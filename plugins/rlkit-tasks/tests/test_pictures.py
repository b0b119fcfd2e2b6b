"""The task of coloured squares, read from its pixels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache

from rlkit_tasks.pictures import BACKGROUND, CELL, COLOURS, COLUMNS, ROWS

from rlkit.interfaces.picture import Picture
from rlkit.tasks import Pictures
from rlkit.types import Row

NAMES = {value: name for name, value in COLOURS.items()}


@cache
def train() -> Sequence[Row]:
    return Pictures().rows("train")


def squares(data: bytes) -> list[str | None]:
    """Return the colour of the square in each cell, by its pixels."""
    image = Picture(data).decode()
    colours: list[str | None] = []
    for cell in range(COLUMNS * ROWS):
        left, top = cell % COLUMNS * CELL, cell // COLUMNS * CELL
        drawn = {colour for _, colour in image.crop((left, top, left + CELL, top + CELL)).getcolors()}
        drawn.discard(BACKGROUND)
        colours.append(NAMES[drawn.pop()] if drawn else None)
        assert not drawn
    return colours


def test_answers_are_right_and_balanced() -> None:
    answers: Counter[str] = Counter()
    for row in train()[:200]:
        colours, question = squares(row["image"]), row["question"]
        if question.startswith("How many"):
            assert row["answer"] == str(colours.count(question.split()[2]))
        else:
            _, _, side, _, colour = question.rstrip("?").split()
            assert colours.count(colour) == 1
            neighbour = colours.index(colour) + (-1 if side == "left" else 1)
            assert colours[neighbour] == row["answer"]
        answers[row["answer"]] += 1
    assert max(answers.values()) < 200 * 0.2


def test_rows_are_the_same_each_time_and_splits_apart() -> None:
    held_out = Pictures(validation_size=50).rows("validation")
    assert train()[:20] == Pictures().rows("train")[:20]
    assert len(held_out) == 50
    arrangements = {tuple(squares(row["image"])) for row in train()[:500]}
    assert not arrangements & {tuple(squares(row["image"])) for row in held_out}


def test_the_control_exchanges_pictures_only() -> None:
    plain, shuffled = train()[:30], Pictures(shuffled=True).rows("train")[:30]
    assert [row["question"] for row in plain] == [row["question"] for row in shuffled]
    assert all(a["image"] != b["image"] for a, b in zip(plain, shuffled, strict=True))


def test_prompts_hold_the_picture_before_the_question() -> None:
    row = Pictures().rows("validation")[0]
    parts = Pictures().prompt(row, 0).messages[0]["content"]
    assert [part["type"] for part in parts] == ["image", "text"]
    assert parts[0]["image"].decode().size == (COLUMNS * CELL, ROWS * CELL)
