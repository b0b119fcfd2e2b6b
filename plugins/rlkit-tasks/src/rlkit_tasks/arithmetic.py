"""Generated additions: the task of the quickstart, with nothing to download."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Annotated

from annotated_types import Ge, Le

from rlkit.base.ranges import NUMBER, PositiveInt
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt, RecordedAnswer, Row


class Arithmetic(Task):
    """Additions of two integers from 0 to `max_operand`, such as `17 + 25 = ?`.

    The split of a pair is fixed (by a hash of the pair), so that validation problems are never
    trained on.

    Args:
        max_operand: The largest operand.
        validation_size: The number of held-out problems in `rows("validation")`.
        mistakes: Wrong answers that each problem records beside the right one, with the reward 0 instead of 1: numbers
            that are 1, 2, 10 or 20 away from it.
    """

    HELD_OUT = 0.1

    def __init__(
        self,
        max_operand: Annotated[int, Ge(4), Le(999), NUMBER] = 99,
        validation_size: PositiveInt = 200,
        mistakes: Annotated[int, Ge(0), Le(4), NUMBER] = 0,
    ) -> None:
        self.max_operand = max_operand
        self.validation_size = validation_size
        self.mistakes = mistakes

    def rows(self, split: Split) -> Sequence[Row]:
        pairs = _shuffled_pairs(self.max_operand)
        held_out = max(1, int(self.HELD_OUT * len(pairs)))
        chosen = pairs[:held_out][: self.validation_size] if split == "validation" else pairs[held_out:]
        return [{"question": f"{a} + {b} = ?", "answer": str(a + b)} for a, b in chosen]

    def prompt(self, row: Row, index: int) -> Prompt:
        right = row["answer"]
        misses = _near_misses(right) if self.mistakes else ()
        wrong = sorted(misses, key=lambda text: _hash(row["question"], text))[: self.mistakes]
        return Prompt(
            id=row["question"],
            messages=[{"role": "user", "content": row["question"]}],
            answer=row["answer"],
            recorded=[_recorded(right, 1.0), *(_recorded(text, 0.0) for text in wrong)],
        )


@lru_cache(maxsize=2)
def _shuffled_pairs(max_operand: int) -> list[tuple[int, int]]:
    """Return all pairs of operands, in the order of their hashes."""
    operands = range(max_operand + 1)
    return sorted(product(operands, operands), key=lambda pair: (_hash(*pair), pair))


def _recorded(text: str, reward: float) -> RecordedAnswer:
    """Return an answer as the tiny model writes it."""
    return RecordedAnswer([{"role": "assistant", "content": f"#### {text}"}], reward)


def _near_misses(right: str) -> set[str]:
    """Return the numbers from 0 that are 1, 2, 10 or 20 away from a number."""
    return {str(number) for gap in (1, 2, 10, 20) for number in (int(right) - gap, int(right) + gap) if number >= 0}


def _hash(a: object, b: object) -> str:
    return hashlib.blake2b(f"{a}+{b}".encode(), digest_size=8).hexdigest()
