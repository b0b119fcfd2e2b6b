"""The completions of a validation as files: JSON lines with their tokens, and the same rows as a parquet table."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from rlkit.base.errors import shorten
from rlkit.base.text import redact
from rlkit.records.folder import json_lines, write_atomically
from rlkit.records.rows import as_row
from rlkit.records.validation_metrics import GradedCompletion
from rlkit.types import JsonObject

if TYPE_CHECKING:
    from rlkit.run.evaluate import Evaluation

MAX_COMPONENTS = 100
"""Components with a column of their own; the JSON lines have all."""

MAX_LOGGED = 32
"""Completions that are passed to loggers."""
MAX_LOGGED_CHARS = 4000
"""Characters of a text that is passed to loggers."""

MAX_BLOCK = 2**30
"""Bytes of JSON that pyarrow reads at once; a row has less."""

TEXTS = ("prompt", "source", "kind", "answer", "text", "final_answer", "stop", "error")


def write_answers(stem: Path, evaluation: Evaluation) -> None:
    """Write this rank's completions to `<stem>.jsonl.gz` and `<stem>.parquet`.

    The table has a row for each completion: `prompt` (its id), `group` (its index), `source`, `kind` (`greedy` or
    `sampled`), `sample` (from 0), `messages` (of the prompt), `answer` (the reference), `text`, `final_answer` (by
    the reward), `reward`, `accuracy`, `reward/<component>`, `stop`, `length` and `turns` (of the policy) and `error`.
    The tables of all ranks have the same columns; a rank without completions writes no table.

    Raises:
        OSError: The files cannot be written.
    """
    table = BytesIO()

    def rows() -> Iterator[JsonObject]:
        for row, answer in _rows(evaluation):
            table.write(json.dumps(_flat(row, answer)).encode() + b"\n")
            yield row

    write_atomically(Path(f"{stem}.jsonl.gz"), json_lines(rows()))
    if table.getbuffer():  # `datasets` cannot read an empty table
        write_atomically(Path(f"{stem}.parquet"), _parquet(table, sorted(evaluation.components)[:MAX_COMPONENTS]))


def answers_to_log(evaluation: Evaluation) -> list[dict[str, str | float | None]]:
    """Return this rank's first greedy completions for loggers, as short texts and numbers."""
    rows: list[dict[str, str | float | None]] = []
    greedy = (pair for pair in _rows(evaluation) if pair[0]["kind"] == "greedy")
    for row, answer in islice(greedy, MAX_LOGGED):
        prompt = "\n".join(f"{message.get('role')}: {_text(message.get('content'))}" for message in row["messages"])
        texts = {"prompt": prompt} | {name: row[name] for name in ("answer", "text", "final_answer")}
        short_texts = {
            name: None if text is None else redact(shorten(_text(text) or "", MAX_LOGGED_CHARS))
            for name, text in texts.items()
        }
        numbers = {"reward": answer.reward, "accuracy": answer.accuracy, "length": answer.length}
        rows.append({"source": answer.source, **short_texts, **numbers, "stop": row["stop"]})
    return rows


def _rows(evaluation: Evaluation) -> Iterator[tuple[JsonObject, GradedCompletion]]:
    """Yield each completion as a row, with its metrics."""
    for prefix, trajectories in evaluation.answers.items():
        samples: Counter[int] = Counter()
        for trajectory in trajectories:
            answer = GradedCompletion.of(trajectory)
            kind = "sampled" if prefix else "greedy"
            origin = {"source": answer.source, "kind": kind, "sample": samples[answer.prompt]}
            samples[answer.prompt] += 1
            yield origin | as_row(trajectory, exact=False), answer


def _parquet(lines: BytesIO, components: Sequence[str]) -> bytes:
    """Return a table of JSON lines; pyarrow reads those without pandas, which takes as long to import as a step."""
    import pyarrow as pa
    from pyarrow.json import ParseOptions, ReadOptions, read_json
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
    block = min(lines.tell(), MAX_BLOCK)
    lines.seek(0)
    table = read_json(lines, ReadOptions(False, block), ParseOptions(schema, unexpected_field_behavior="ignore"))
    buffer = BytesIO()
    write_table(table, buffer, compression="zstd")
    return buffer.getvalue()


def _flat(row: JsonObject, answer: GradedCompletion) -> JsonObject:
    """Return a row of the table: only the columns of its schema, with texts in valid UTF-8."""
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


def _text(value: object) -> str | None:
    """Return a text, or the JSON of any other value; half of a surrogate pair is escaped."""
    if value is None:
        return None
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
    return text.encode("utf-8", "backslashreplace").decode()
