"""The answers of a validation as files: JSON lines with their tokens, and the same rows as a table in parquet."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

from rlkit.errors import shorten
from rlkit.run.folder import json_lines, write_whole
from rlkit.run.rows import as_row
from rlkit.text import redact
from rlkit.train.validation.evaluate import Evaluation
from rlkit.train.validation.metrics import GradedCompletion
from rlkit.types import JsonObject

MAX_COMPONENTS = 100
"""Components with a column of their own; the JSON lines have all."""

LOGGED, LONGEST = 32, 4000
"""So many answers go to loggers, and so many characters of a text."""

TEXTS = ("prompt", "source", "kind", "answer", "text", "final_answer", "stop", "error")


def write_answers(stem: Path, found: Evaluation) -> None:
    """Write this rank's answers to `<stem>.jsonl.gz` and `<stem>.parquet`.

    The table has a row for each answer: `prompt` (its id), `group` (its place), `source`, `kind` (`greedy` or
    `sampled`), `sample` (from 0), `messages` (of the prompt), `answer` (the reference), `text`, `final_answer` (by
    the reward), `reward`, `accuracy`, `reward/<component>`, `stop`, `length` and `turns` (of the policy) and `error`.
    All ranks' tables have the same columns; a rank without answers has none.

    Raises:
        OSError: They cannot be written.
    """
    write_whole(Path(f"{stem}.jsonl.gz"), json_lines(row for row, _ in _rows(found)))
    if found.trajectories:  # `datasets` cannot read a table of none
        rows = [_flat(row, answer) for row, answer in _rows(found)]
        write_whole(Path(f"{stem}.parquet"), _parquet(rows, sorted(found.components)[:MAX_COMPONENTS]))


def answers_to_log(found: Evaluation) -> list[dict[str, str | float | None]]:
    """Return the first greedy answers of this rank, for loggers: short texts and numbers."""
    rows: list[dict[str, str | float | None]] = []
    for row, answer in islice((pair for pair in _rows(found) if pair[0]["kind"] == "greedy"), LOGGED):
        said = "\n".join(f"{message.get('role')}: {_text(message.get('content'))}" for message in row["messages"])
        texts = {"prompt": said, "answer": row["answer"], "text": row["text"], "final_answer": row["final_answer"]}
        kept = {
            name: None if text is None else redact(shorten(_text(text) or "", LONGEST)) for name, text in texts.items()
        }
        numbers = {"reward": answer.reward, "accuracy": answer.accuracy, "length": answer.length}
        rows.append({"source": answer.source, **kept, **numbers, "stop": row["stop"]})
    return rows


def _rows(found: Evaluation) -> Iterator[tuple[JsonObject, GradedCompletion]]:
    """Yield what is kept of each answer, and its metrics."""
    for prefix, trajectories in found.answers.items():
        samples: Counter[int] = Counter()
        for trajectory in trajectories:
            answer, kind = GradedCompletion.of(trajectory), "sampled" if prefix else "greedy"
            place = {"source": answer.source, "kind": kind, "sample": samples[answer.prompt]}
            samples[answer.prompt] += 1
            yield place | as_row(trajectory), answer


def _parquet(rows: Sequence[JsonObject], components: Sequence[str]) -> bytes:
    import pyarrow as pa
    from pyarrow.parquet import write_table

    text, number = pa.string(), pa.float64()
    message = pa.struct([("role", text), ("content", text)])
    schema = pa.schema([
        ("prompt", text), ("group", pa.int64()), ("source", text), ("kind", text), ("sample", pa.int64()),
        ("messages", pa.list_(message)), ("answer", text), ("text", text), ("final_answer", text),
        ("reward", number), ("accuracy", number),
        *((f"reward/{name}", number) for name in components), ("stop", text), ("length", pa.int64()),
        ("turns", pa.int64()), ("error", text),
    ])  # fmt: skip
    buffer = BytesIO()
    write_table(pa.Table.from_pylist(rows, schema), buffer, compression="zstd")
    return buffer.getvalue()


def _flat(row: JsonObject, answer: GradedCompletion) -> JsonObject:
    """Return a row of the table, in which each text is valid UTF-8; what is not in its schema is left out."""
    flat: JsonObject = {f"reward/{name}": value for name, value in answer.components.items()}
    flat |= {name: _text(row[name]) for name in TEXTS}
    flat["messages"] = [{"role": _text(m.get("role")), "content": _text(m.get("content"))} for m in row["messages"]]
    flat |= {
        "group": answer.prompt,
        "sample": row["sample"],
        "length": answer.length,
        "turns": len(row["turn_rewards"]),
    }
    return flat | {"reward": answer.reward, "accuracy": answer.accuracy}


def _text(value: Any) -> str | None:
    """Return a text, or JSON of what is none; half of a surrogate pair is written out."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()
