"""Tasks from files and data sets of any kind: columns become prompts."""

from __future__ import annotations

import hashlib
import json
import os
from abc import abstractmethod
from collections.abc import Sequence
from glob import has_magic
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

import rlkit
from rlkit.base.errors import RecipeError
from rlkit.base.files import is_url
from rlkit.base.ranges import NonNegativeInt, ShareBelowOne
from rlkit.interfaces.rows import TextTemplate, as_text, column, field_of, location_of
from rlkit.interfaces.task import Split, Task
from rlkit.types import Message, Prompt, Row
from rlkit_tasks import sources
from rlkit_tasks.chat import ChatRow
from rlkit_tasks.lines import suffix_of
from rlkit_tasks.recorded import recording
from rlkit_tasks.table import Table
from rlkit_tasks.text_rows import TextRows

ENCODE = json.JSONEncoder(sort_keys=True, default=str).encode


class Columns(Task):
    """Rows with prompt and answer in columns; a share of them may be held out."""

    no_validation: ClassVar[str] = (
        "the task has no validation rows: set task.validation_path, a share of the training rows to hold out "
        "(task.validation_split: 0.05), or switch validation off (validation: null)"
    )
    validation_split: float | str | None

    def __init__(
        self, prompt_field: str, answer_field: str | None, template: str | None, system: str | None, split_seed: int
    ) -> None:
        self.prompt_field = prompt_field
        self.answer_field = answer_field
        self.template = template
        self._template = None if template is None else TextTemplate(template)
        self.system = system
        self.split_seed = split_seed

    @abstractmethod
    def _source(self) -> str:
        """Return the source of the rows, for messages."""

    @abstractmethod
    def _train(self) -> sources.Rows:
        """Return the training rows, with those that may be held out."""

    @abstractmethod
    def _validation(self) -> sources.Rows | None:
        """Return validation rows that are no training rows; None if there are none."""

    def rows(self, split: Split) -> Sequence[Row]:
        rows = self._split(split)
        if isinstance(rows, Table) and not len(rows):
            names = ", ".join(name for name, _ in rows.tables)
            raise RecipeError(
                f"task {type(self).__name__} has no {split} rows, expected at least one; nothing is in {names}"
            )
        return rows

    def _split(self, split: Split) -> sources.Rows:
        validation = self._validation() if split == "validation" else None
        if validation is not None:
            return self._checked(validation)
        if isinstance(self.validation_split, float):
            return self._divided(self._train(), self.validation_split, split)
        if split == "validation":
            raise RecipeError(self.no_validation)
        return self._checked(self._train())

    def prompt(self, row: Row, index: int) -> Prompt:
        return self._make(row, location_of(row, f"{self._source()}, row {index}"), str(index))

    def _make(self, row: Row, location: str, name: str) -> Prompt:
        chat = ChatRow(row, location)
        messages = self._messages(chat)
        if self.system is not None and messages:
            messages.insert(0, {"role": "system", "content": self.system})
        used = {self.answer_field, "id"} if self.template is not None else {self.prompt_field, self.answer_field, "id"}
        used &= {"prompt", "answer", "id"}  # rewards take any other column by its own name
        return Prompt(
            id=name if row.get("id") is None else str(row["id"]),
            messages=messages,
            answer=self._answer(row, location),
            meta={key: value for key, value in row.items() if key not in used},
            tools=chat.tools(),
            recorded=recording(chat, messages if self._prompted(row) else None).answers,
            normalised=chat.changes,
        )

    def _answer(self, row: Row, location: str) -> str | None:
        """Return the reference answer in a row, None if there is none."""
        if self.answer_field is None:
            return None
        return as_text(column(row, self.answer_field, location, "task.answer_field"))

    def _messages(self, chat: ChatRow) -> list[Message]:
        """Return the messages in a row, without the recipe's system message."""
        if self._template is not None:
            return [{"role": "user", "content": self._template.fill(chat.row, chat.location)}]
        recorded_prompt = None if self._prompted(chat.row) else recording(chat, None).prompt
        if recorded_prompt is not None:
            return list(recorded_prompt)
        content = column(chat.row, self.prompt_field, chat.location, "task.prompt_field")
        return chat.prompt(content, self.prompt_field)

    def _prompted(self, row: Row) -> bool:
        """Whether a row has a prompt of its own, besides answers that it records."""
        try:
            return self._template is not None or field_of(row, self.prompt_field) is not None
        except KeyError:
            return False

    def _checked(self, rows: sources.Rows) -> sources.Rows:
        """Return rows, of which those in text files are checked."""
        for part in rows.tables if isinstance(rows, Table) else ():
            if isinstance(part[1], TextRows):
                self._digests(Table([part]))
        return rows

    def _digests(self, rows: sources.Rows) -> NDArray[np.uint64]:
        """Check all rows; return a digest of the prompt of each, or of the answers of one without, and of the seed."""

        def compute() -> NDArray[np.uint64]:
            digests = bytearray()
            for index, row in enumerate(rows):
                prompt = self._make(row, location_of(row, f"{self._source()}, row {index}"), "")
                messages = prompt.messages[self.system is not None :]
                messages = messages or [m for answer in prompt.recorded for m in answer.messages]
                content = f"{self.split_seed}\x1f{ENCODE(messages)}"
                digests.extend(hashlib.blake2b(content.encode(), digest_size=8).digest())
            return np.frombuffer(bytes(digests), ">u8").astype(np.uint64)

        text = rows.tables[0][1] if isinstance(rows, Table) else None
        kind = type(self)
        if not isinstance(text, TextRows) or not kind.__module__.startswith("rlkit_tasks."):
            return compute()
        options = (
            rlkit.__version__, kind.__name__, self.prompt_field, self.answer_field, self.template, self.system,
            self.split_seed,
        )  # fmt: skip
        return text.stored(hashlib.blake2b(repr(options).encode(), digest_size=16).hexdigest(), compute)

    def _divided(self, rows: sources.Rows, share: float, split: Split) -> sources.Rows:
        """Return one split of the rows; it depends on the seed and the prompt, or the answers of a row without one.

        Raises:
            RecipeError: None is left to train on.
        """

        tables = [Table([part]) for part in rows.tables] if isinstance(rows, Table) else [rows]
        digests = np.concatenate([np.empty(0, np.uint64), *map(self._digests, tables)])
        train, held_out = sources.divide(rows, share, digests)
        if split == "train" and len(held_out) and not len(train):
            equal = len(rows) > 1 and bool((digests == digests[0]).all())
            cause = f"all {len(rows)} rows are equal, and equal rows" if equal else f"all {len(rows)} rows"
            raise RecipeError(
                f"{self._source()}: no row is left to train on: with validation_split: {share:g}, {cause} are held "
                "out; add different rows, choose a smaller share, or set task.validation_path"
            )
        return train if split == "train" else held_out


class Jsonl(Columns):
    """Files with one JSON object a line: a prompt (text, or chat messages), an answer, anything else as `meta`.

    Rows stay on disk. Files of more than 1 MiB are copied to `~/.cache/rlkit/rows`, with an index that later starts
    read; a run goes on with its copy whatever becomes of the files. The folder may be removed.

    Args:
        path: The training file; a pattern such as `data/*.jsonl` or a list names several.
        validation_path: The validation files; null if there are none.
        validation_split: The share of the training rows to hold out instead, selected by their prompts and
            `split_seed`, whatever their order.
        prompt_field: The field with the prompt; `a.b` is the field `b` inside `a`.
        answer_field: The field with the answer, such as `reward_model.ground_truth`; null if there is none.
        template: The prompt's text with fields in braces, such as `{question} Answer with ####.`, instead of a field.
        system: A system message to put before each prompt.
        split_seed: Seed of the selection of held-out rows.
    """

    def __init__(
        self,
        path: str | list[str],
        validation_path: str | list[str] | None = None,
        *,
        validation_split: ShareBelowOne | None = None,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str | None = None,
        system: str | None = None,
        split_seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__(prompt_field, answer_field, template, system, split_seed)
        _check_validation(validation_path, validation_split)
        self.path = path
        self.validation_path = validation_path
        self.validation_split = validation_split

    def files(self) -> list[tuple[str, str]]:
        return sources.local(self.path, "path") + sources.local(self.validation_path, "validation_path")

    def _train(self) -> sources.Rows:
        return self._read(self.path, "task.path")

    def _validation(self) -> sources.Rows | None:
        return None if self.validation_path is None else self._read(self.validation_path, "task.validation_path")

    def _read(self, paths: sources.Paths, option: str) -> sources.Rows:
        names = sources.expand(paths, option)
        rows = TextRows(names, [None] * len(names))
        return Table([(", ".join(rows.names), rows)])

    def _source(self) -> str:
        return str(self.path)


class HFDataset(Columns):
    """Rows of files, of a data set of the Hugging Face hub, or of a local folder in its layout.

    Files are parquet, JSON lines, JSON, CSV, TSV or Arrow, packed or not, local or at any URL that fsspec opens; a
    folder may also be one that `datasets` has saved. Fields of CSV files are texts. Text files are copied as those of
    `Jsonl` are.

    Args:
        path: A name such as `openai/gsm8k`, a folder, or a training file; a pattern, or a list, names several files.
        validation_path: The validation files, where `path` is a file.
        name: The data set's configuration.
        train_split: The split to train on.
        validation_split: The split to validate on, or the share of the training rows to hold out, as `Jsonl` does.
        prompt_field: The column with the prompt (text, or chat messages); `a.b` is the field `b` inside `a`.
        answer_field: The column with the answer, such as `reward_model.ground_truth`; null if there is none.
        template: The prompt's text with columns in braces, such as `{question} Answer with ####.`, instead of a column.
        system: A system message to put before each prompt.
        split_seed: Seed of the selection of held-out rows.
    """

    def __init__(
        self,
        path: str | list[str],
        validation_path: str | list[str] | None = None,
        *,
        name: str | None = None,
        train_split: str = "train",
        validation_split: ShareBelowOne | str = "test",
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        template: str | None = None,
        system: str | None = None,
        split_seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__(prompt_field, answer_field, template, system, split_seed)
        _check_validation(validation_path, validation_split)
        self.path = path
        self.validation_path = validation_path
        self.name = name
        self.train_split = train_split
        self.validation_split = validation_split

    def files(self) -> list[tuple[str, str]]:
        paths = sources.local(self.path, "path") if self._is_file else []
        return paths + sources.local(self.validation_path, "validation_path")

    def _train(self) -> sources.Rows:
        return self._all(self.train_split)

    def _validation(self) -> sources.Rows | None:
        if self.validation_path is not None:
            return sources.matching(self.validation_path, "task.validation_path")
        if self._is_file or not isinstance(self.validation_split, str):
            return None
        return self._all(self.validation_split)

    def _all(self, split: str) -> sources.Rows:
        if isinstance(self.path, list) or self._is_file:
            return sources.matching(self.path, "task.path")
        folder = Path(os.path.expanduser(self.path))
        if any(os.path.isfile(folder / name) for name in sources.SAVED):
            return sources.saved(folder, split, "task.path")
        return sources.hub(self.path, self.name, split, "task.path")

    @property
    def _is_file(self) -> bool:
        if isinstance(self.path, list) or is_url(self.path):
            return True
        return has_magic(self.path) or suffix_of(self.path) in sources.KINDS

    def _source(self) -> str:
        return str(self.path)


class KnownColumns(HFDataset):
    """Rows of a form that another system documents, so that only their location is an option; see `HFDataset`."""

    ANSWER: ClassVar[str | None] = None
    """The column with the answer."""

    def __init__(
        self,
        path: str | list[str],
        validation_path: str | list[str] | None = None,
        *,
        name: str | None = None,
        train_split: str = "train",
        validation_split: ShareBelowOne | str = "test",
        system: str | None = None,
        split_seed: NonNegativeInt = 0,
    ) -> None:
        super().__init__(
            path,
            validation_path,
            name=name,
            train_split=train_split,
            validation_split=validation_split,
            answer_field=self.ANSWER,
            system=system,
            split_seed=split_seed,
        )


def _check_validation(path: str | list[str] | None, split: float | str | None) -> None:
    """Raise a RecipeError if there are validation files, and a share of the training rows is held out besides."""
    if path is not None and not isinstance(split, str | None):
        raise RecipeError(f"task has validation_path={path!r} and validation_split={split}; remove one")
