"""Rows that no recipe names: a task of rows in memory, for Python, and rows of files, for the command line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import NonNegativeInt, ShareBelowOne
from rlkit.interfaces.task import RowReader, Task
from rlkit.types import Prompt, Row
from rlkit_tasks import sources
from rlkit_tasks.files import Columns


class Rows(Columns):
    """Rows that a script or a notebook has: a list of dictionaries, or a `datasets.Dataset`.

    No recipe can name it: `Jsonl` and `HFDataset` read rows from files.

    Args:
        rows: The training rows: a prompt (text, or chat messages), an answer if there is one, anything else as `meta`.
        validation: The validation rows; None if there are none.
        validation_split: The share of the training rows to hold out instead; which ones they are depends on their
            prompts and `split_seed`, not on their order.
        prompt_field: The field with the prompt; `a.b` is the field `b` inside `a`.
        answer_field: The field with the answer; None if there is none.
        template: The prompt's text with fields in braces, such as `{question} Answer with ####.`, instead of a field.
        system: A system message to put before each prompt.
        split_seed: Another number holds out other rows.

    Raises:
        RecipeError: The rows are no such sequence.
    """

    no_validation = (
        "the task has no validation rows: pass Rows(rows, validation=...), a share of the rows to hold out "
        "(validation_split=0.05), or switch validation off (validation=None)"
    )

    def __init__(
        self,
        rows: Sequence[Row],
        validation: Sequence[Row] | None = None,
        *,
        validation_split: ShareBelowOne | None = None,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str | None = None,
        system: str | None = None,
        split_seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__(prompt_field, answer_field, template, system, split_seed)
        if validation is not None and validation_split is not None:
            raise RecipeError(f"Rows has validation rows and validation_split={validation_split}; remove one")
        self.train = _sequence(rows, "rows")
        self.validation = None if validation is None else _sequence(validation, "validation")
        self.validation_split = validation_split

    @property
    def holds_out(self) -> bool:
        return self.validation is not None or self.validation_split is not None

    def _train(self) -> sources.Rows:
        return self.train

    def _validation(self) -> sources.Rows | None:
        return self.validation

    def _make(self, row: Row, location: str, name: str) -> Prompt:
        if not isinstance(row, Mapping):
            raise RecipeError(
                f'{location} is {show(row)}, expected a dictionary such as {{"prompt": "2 + 2 = ?", "answer": "4"}}'
            )
        return super()._make({"answer": None, **row}, location, name)

    def _source(self) -> str:
        return "task"

    def __repr__(self) -> str:
        options = (
            self.validation_split,
            self.prompt_field,
            self.answer_field,
            self.template,
            self.system,
            self.split_seed,
        )
        digest = hashlib.sha256(repr(options).encode())
        for rows in (self.train, self.validation or ()):
            digest.update(_digest(rows))
        return f"Rows({len(self.train)} rows, digest {digest.hexdigest()[:8]})"


class Tables(RowReader):
    """Reads the files that `HFDataset` reads."""

    def rows_of(self, names: str, option: str) -> sources.Rows:
        return sources.matching(names, option)

    def task_of(self, rows: sources.Rows) -> Task:
        return Rows(rows)


def _sequence(rows: Any, name: str) -> sources.Rows:
    if isinstance(rows, str | bytes | Mapping) or not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")):
        raise RecipeError(
            f"Rows has {name}={show(rows)}, expected a list of dictionaries, or a split of a data set: list(...) makes "
            "one of a generator"
        )
    return rows  # type: ignore[no-any-return]


def _digest(rows: sources.Rows) -> bytes:
    """Return a fingerprint of rows; a `datasets.Dataset`, which may be large, has its own."""
    fingerprint = getattr(rows, "_fingerprint", None)
    if fingerprint is not None:
        return str(fingerprint).encode()
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.digest()
