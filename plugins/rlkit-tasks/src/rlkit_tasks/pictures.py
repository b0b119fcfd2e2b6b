"""Generated pictures of coloured squares with questions about them, with nothing to download."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from random import Random
from typing import Annotated

from annotated_types import Ge, Le

from rlkit.base.ranges import NUMBER
from rlkit.interfaces.picture import Picture
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt, Row

COLUMNS, ROWS = 3, 2
CELL, SQUARE = 28, 20
"""Pixels along the side of a cell of the grid, and of the square in it."""
CELLS = range(COLUMNS * ROWS)

COLOURS = {
    "red": (230, 30, 30), "green": (30, 160, 50), "blue": (40, 70, 230), "yellow": (250, 220, 40),
    "pink": (250, 150, 200), "black": (20, 20, 20),
}  # fmt: skip
BACKGROUND = (255, 255, 255)

STEPS = {"left of": (-1, 0), "right of": (1, 0)}
"""Columns and rows from a square to its neighbour, by the words of the question."""

MOST = 4
"""The largest number of squares that is asked for."""


@dataclass(frozen=True)
class Scene:
    """A picture before it is drawn, with a question about it.

    Args:
        cells: The colour of the square in each cell, row by row; None for an empty cell.
        colour: The colour in the question.
        step: The words of the question for the position of a neighbour; None if the question asks for a number.
        answer: The right answer: a number, or the colour of the neighbour.
        seed: The random seed of the positions of the squares in their cells.
    """

    cells: tuple[str | None, ...]
    colour: str
    step: str | None
    answer: str
    seed: str

    @property
    def question(self) -> str:
        """The question's text."""
        return f"How many {self.colour} squares?" if self.step is None else f"What is {self.step} {self.colour}?"

    @property
    def held_out(self) -> bool:
        """Whether the picture is for validation: a tenth of all arrangements of colours are, by their hash."""
        digest = hashlib.blake2b(repr(self.cells).encode(), digest_size=8).digest()
        return int.from_bytes(digest) % 10 == 0

    def draw(self) -> bytes:
        """Return the picture as PNG."""
        from PIL import Image, ImageDraw

        image = Image.new("RGB", (COLUMNS * CELL, ROWS * CELL), BACKGROUND)
        brush = ImageDraw.Draw(image)
        rng = Random(self.seed)
        for cell, colour in enumerate(self.cells):
            left = cell % COLUMNS * CELL + rng.randint(0, CELL - SQUARE)
            top = cell // COLUMNS * CELL + rng.randint(0, CELL - SQUARE)
            if colour is not None:
                brush.rectangle((left, top, left + SQUARE - 1, top + SQUARE - 1), COLOURS[colour])
        file = io.BytesIO()
        image.save(file, "PNG")
        return file.getvalue()


def scenes() -> Iterator[Scene]:
    """Yield scenes without end, always the same ones: every second question asks for a number."""
    number = 0
    while True:
        seed = f"pictures {number}"
        yield _counting(seed) if number % 2 == 0 else _neighbours(seed)
        number += 1


def _counting(seed: str) -> Scene:
    """Return a scene with a question for the number of squares of a colour, from 0 to `MOST`."""
    rng = Random(seed)
    colour, count = rng.choice(list(COLOURS)), rng.randint(0, MOST)
    cells = [colour] * count + [_other(rng, colour) for _ in CELLS[count:]]
    rng.shuffle(cells)
    return Scene(tuple(cells), colour, None, str(count), seed)


def _neighbours(seed: str) -> Scene:
    """Return a scene with a question for the colour next to the only square of a colour."""
    rng = Random(seed)
    colour, step = rng.choice(list(COLOURS)), rng.choice(list(STEPS))
    neighbours = {cell: neighbour_of(cell, step) for cell in CELLS}
    cell, neighbour = rng.choice([(cell, other) for cell, other in neighbours.items() if other is not None])
    answer = rng.choice([name for name in COLOURS if name != colour])
    cells = [_other(rng, colour) for _ in CELLS]
    cells[cell], cells[neighbour] = colour, answer
    return Scene(tuple(cells), colour, step, answer, seed)


def neighbour_of(cell: int, step: str) -> int | None:
    """Return the cell that is one step away from a cell; None if that is outside of the grid."""
    column, row = cell % COLUMNS + STEPS[step][0], cell // COLUMNS + STEPS[step][1]
    return row * COLUMNS + column if 0 <= column < COLUMNS and 0 <= row < ROWS else None


def _other(rng: Random, colour: str) -> str | None:
    """Draw a colour that is not `colour`, or an empty cell."""
    return rng.choice([None, None, *(name for name in COLOURS if name != colour)])


class Pictures(Task):
    """Pictures of up to six coloured squares: `How many red squares?`, or `What is left of blue?`.

    The answer is a number from 0 to 4 or a colour, each as frequent as the others, so that guesses without a look at
    the picture are right in one of five. The split of a picture is fixed (by a hash of its squares), so that validation
    pictures are never trained on.

    Args:
        validation_size: The number of held-out questions in `rows("validation")`.
        shuffled: Whether each question has the picture of the next question, which does not show its answer: a control
            on which nothing is to be learned.
    """

    TRAINING_SIZE = 4000

    def __init__(self, validation_size: Annotated[int, Ge(1), Le(2000), NUMBER] = 200, shuffled: bool = False) -> None:
        self.validation_size = validation_size
        self.shuffled = shuffled

    def rows(self, split: Split) -> Sequence[Row]:
        size = self.TRAINING_SIZE if split == "train" else self.validation_size
        chosen = list(islice((scene for scene in scenes() if scene.held_out == (split == "validation")), size))
        pictures = [scene.draw() for scene in chosen]
        if self.shuffled:
            pictures = pictures[1:] + pictures[:1]
        return [
            {"question": scene.question, "answer": scene.answer, "image": picture, "name": scene.seed}
            for scene, picture in zip(chosen, pictures, strict=True)
        ]

    def prompt(self, row: Row, index: int) -> Prompt:
        picture = {"type": "image", "image": Picture(row["image"])}
        question = {"type": "text", "text": row["question"]}
        return Prompt(id=row["name"], messages=[{"role": "user", "content": [picture, question]}], answer=row["answer"])
