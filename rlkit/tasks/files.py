"""Tasks from files and data sets of any kind: columns become prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlkit.errors import RecipeError
from rlkit.roles.task import Split, Task
from rlkit.tasks import sources
from rlkit.types import Prompt


class _Columns(Task):
    """Rows whose prompt and answer stand in two columns."""

    def __init__(self, prompt_field: str, answer_field: str | None, system: str | None) -> None:
        self.prompt_field = prompt_field
        self.answer_field = answer_field
        self.system = system

    def prompt(self, row: Mapping[str, Any], index: int) -> Prompt:
        for name in (self.prompt_field, self.answer_field):
            if name is not None and name not in row:
                raise RecipeError(f"task: row {index} has no column {name!r}; it has: {', '.join(row)}")
        content = row[self.prompt_field]
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else list(content)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        answer = None if self.answer_field is None else row[self.answer_field]
        used = {self.prompt_field, self.answer_field, "id"}
        return Prompt(
            id=str(row.get("id", index)),
            messages=messages,
            answer=None if answer is None else str(answer),
            meta={key: value for key, value in row.items() if key not in used},
        )


class Jsonl(_Columns):
    """A file with one JSON object a line: a prompt (text, or chat messages), an answer, anything else as `meta`.

    Args:
        path: The training file.
        validation_path: The validation file.
        prompt_field: Where the prompt stands.
        answer_field: Where the answer stands; null if there is none.
        system: A system message to put before each prompt.
    """

    def __init__(
        self,
        path: str,
        validation_path: str,
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        system: str | None = None,
    ) -> None:
        super().__init__(prompt_field, answer_field, system)
        self.path = path
        self.validation_path = validation_path

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        option, given = ("task.path", self.path) if split == "train" else ("task.validation_path", self.validation_path)
        fields = [f for f in (self.prompt_field, self.answer_field) if f is not None]
        return sources.jsonl(sources.existing(Path(given), option), fields)


class HFDataset(_Columns):
    """A data set of the Hugging Face hub, a local folder in its form, or parquet, JSON lines and CSV files.

    Args:
        path: A name such as `openai/gsm8k`, a folder, or a training file.
        validation_path: A validation file, where `path` is a file.
        name: The data set's configuration.
        train_split: The split to train on.
        validation_split: The split to validate on.
        prompt_field: The column with the prompt: text, or chat messages.
        answer_field: The column with the answer; null if there is none.
        system: A system message to put before each prompt.
    """

    def __init__(
        self,
        path: str,
        validation_path: str | None = None,
        *,
        name: str | None = None,
        train_split: str = "train",
        validation_split: str = "test",
        prompt_field: str = "prompt",
        answer_field: str | None = "answer",
        system: str | None = None,
    ) -> None:
        super().__init__(prompt_field, answer_field, system)
        self.path = path
        self.validation_path = validation_path
        self.name = name
        self.train_split = train_split
        self.validation_split = validation_split

    def rows(self, split: Split) -> Sequence[Mapping[str, Any]]:
        if Path(self.path).suffix not in (".parquet", ".jsonl", ".json", ".csv"):
            given = self.train_split if split == "train" else self.validation_split
            return sources.hub(self.path, self.name, given, "task.path")
        if self.validation_path is None:
            raise RecipeError("task.path is a file, so task.validation_path must name the validation file")
        option, given = ("task.path", self.path) if split == "train" else ("task.validation_path", self.validation_path)
        return sources.files([Path(given)], option)
