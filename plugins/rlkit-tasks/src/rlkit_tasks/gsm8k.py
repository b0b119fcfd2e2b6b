"""Grade-school mathematics (Cobbe et al. 2021, arXiv:2110.14168)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces.rows import column, location_of
from rlkit.interfaces.task import Split, Task
from rlkit.types import Prompt, RecordedAnswer, Row
from rlkit_tasks import sources

FILES = {"train": "train", "validation": "test"}


class GSM8K(Task):
    """GSM8K's questions: 7,473 to train on, 1,319 to validate.

    Args:
        path: A folder with `train.jsonl` and `test.jsonl`, or with the data set's parquet files; None loads
            `openai/gsm8k` through `datasets`.
        instruction: Put after each question.
    """

    def __init__(
        self,
        path: str | None = None,
        instruction: str = "Think step by step, then write the final number after ####.",
    ) -> None:
        self.path = path
        self.instruction = instruction

    def rows(self, split: Split) -> Sequence[Row]:
        if self.path is None:
            return sources.hub("openai/gsm8k", name="main", split=FILES[split], option="task.path")
        folder = sources.existing(Path(self.path), option="task.path")
        lines = folder / f"{FILES[split]}.jsonl"
        if os.path.exists(lines):
            rows = sources.matching(str(lines), "task.path")
            for row in rows:
                _texts(row, location_of(row, ""))
            return rows
        shards = sorted(folder.rglob(f"{FILES[split]}-*.parquet")) or [lines]
        return sources.files([str(sources.regular(path, "task.path")) for path in shards], "task.path")

    def prompt(self, row: Row, index: int) -> Prompt:
        question, answer = _texts(row, location_of(row, f"task {type(self).__name__}, row {index}"))
        return Prompt(
            id=f"gsm8k-{index}",
            messages=[{"role": "user", "content": f"{question}\n{self.instruction}" if self.instruction else question}],
            answer=answer,
            meta={"data_source": "openai/gsm8k"},
            recorded=[RecordedAnswer([{"role": "assistant", "content": answer}])],
        )


def _texts(row: Row, location: str) -> list[str]:
    """Return a row's question and answer.

    Raises:
        RecipeError: One is missing, or not text.
    """
    texts: list[str] = []
    for name in ("question", "answer"):
        text = column(row, name, location, "of GSM8K")
        if not isinstance(text, str):
            raise RecipeError(f"{location}: {name!r} is {show(text)}, expected text")
        texts.append(text)
    return texts
