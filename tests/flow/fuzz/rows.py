"""Data files with one row that is wrong among good ones, in each shape of columns, and paths that are no data files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.flow.fuzz.bases import Base, as_lines, bases
from tests.flow.fuzz.cases import Case
from tests.flow.fuzz.texts import PATHS
from tests.flow.fuzz.values import reason_of_column

TRAIN = as_lines([{"prompt": f"{n} + 2 = ?", "answer": str(n + 2)} for n in range(8)])

ROWS: dict[str, str | bytes] = {
    "a number": '{"prompt": 5, "answer": "7"}',
    "null": '{"prompt": null, "answer": "7"}',
    "true": '{"prompt": true, "answer": "7"}',
    "a list of texts": '{"prompt": ["a", "b"], "answer": "7"}',
    "an empty list": '{"prompt": [], "answer": "7"}',
    "a mapping": '{"prompt": {"role": "user"}, "answer": "7"}',
    "messages without content": '{"prompt": [{"role": "user"}], "answer": "7"}',
    "messages without role": '{"prompt": [{"content": "a"}], "answer": "7"}',
    "a role that is a number": '{"prompt": [{"role": 5, "content": "a"}], "answer": "7"}',
    "content null": '{"prompt": [{"role": "user", "content": null}], "answer": "7"}',
    "content a number": '{"prompt": [{"role": "user", "content": 5}], "answer": "7"}',
    "half a pair": '{"prompt": "a\\ud800", "answer": "7"}',
    "half a pair inside": '{"prompt": [{"role": "user", "content": "\\udfff"}], "answer": "7"}',
    "half a pair in the answer": '{"prompt": "a", "answer": "\\ud800"}',
    "5,000 digits": f'{{"prompt": "a", "answer": {"9" * 5000}}}',
    "5,000 digits prompt": f'{{"prompt": {"9" * 5000}, "answer": "7"}}',
    "no prompt": '{"answer": "7"}',
    "no answer": '{"prompt": "a"}',
    "a list": "[1, 2]",
    "a bare number": "5",
    "a bare null": "null",
    "not JSON": "{prompt: a}",
    "unclosed": '{"prompt": "a"',
    "two on a line": '{"prompt": "a", "answer": "7"}{"prompt": "b", "answer": "7"}',
    "100,000 deep": "[" * 100_000,
    "deep inside": '{"prompt": ' + "[" * 5000,
    "UTF-16": TRAIN.encode("utf-16"),
    "UTF-16 without mark": TRAIN.encode("utf-16-le"),
    "UTF-32": TRAIN.encode("utf-32"),
    "latin-1": '{"prompt": "caf\xe9", "answer": "7"}'.encode("latin-1"),
    "binary": bytes(range(256)),
    "NUL": b"\0" * 10,
    "gzip": b"\x1f\x8b\x08\0",
    "empty": "",
    "blank": "\n\n",
    "too long": json.dumps({"prompt": "2 + 2 " * 20_000, "answer": "7"}),
    "NUL in a prompt": '{"prompt": "a\x00b", "answer": "7"}',
    "content a list of numbers": '{"prompt": [{"role": "user", "content": [1]}], "answer": "7"}',
}
LEGAL_ROWS: dict[str, str | bytes] = {
    "answer null": '{"prompt": "a", "answer": null}',
    "answer a number": '{"prompt": "a", "answer": 7}',
    "answer NaN": '{"prompt": "a", "answer": NaN}',
    "answer a list": '{"prompt": "a", "answer": [1]}',
    "empty prompt": '{"prompt": "", "answer": "7"}',
    "BOM": b"\xef\xbb\xbf" + TRAIN.encode(),
    "a duplicate key": '{"prompt": "a", "prompt": "b", "answer": "7"}',
    "a NUL written out": '{"prompt": "a\\u0000b", "answer": "7"}',
    "id a list": '{"prompt": "a", "answer": "7", "id": [1]}',
    "unknown role": '{"prompt": [{"role": "x", "content": "a"}], "answer": "7"}',
    "DOS": TRAIN.replace("\n", "\r\n"),
    "an assistant first": '{"prompt": [{"role": "assistant", "content": "a"}], "answer": "7"}',
    "extra fields": '{"prompt": "a", "answer": "7", "x": {"y": [1e999]}}',
    "a pair": '{"prompt": "\\ud83d\\ude00", "answer": "7"}',
}

COLUMN: dict[str, Any] = {
    "null": None,
    "a number": 5,
    "below zero": -7.5,
    "NaN": float("nan"),
    "infinite": float("inf"),
    "1e40": 1e40,
    "4,000 digits": 10**3999,
    "true": True,
    "a text": "x",
    "an empty text": "",
    "half a pair": "a\ud800",
    "an empty list": [],
    "a list of numbers": [1, 2],
    "a list of texts": ["a", "b"],
    "a list of lists": [[], [[]]],
    "a list of nulls": [None, None],
    "a mapping": {"role": "user"},
    "an empty mapping": {},
    "a message": [{"role": "user", "content": "a"}],
    "messages without content": [{"role": "user"}, {"role": "assistant"}],
    "assistants alone": [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
}


def row_cases() -> Iterator[Case]:
    """Yield files with one row that is wrong, and then with one column of a row that is."""
    base = bases()["grpo"]
    for split in ("train", "validation"):
        for name, row in (ROWS | LEGAL_ROWS).items():
            legal = "a row that can be used" if name in LEGAL_ROWS else None
            yield Case("row", base.name, f"{split}: {name}", _with_row(base, f"{split}.jsonl", row), legal)
        option = "path" if split == "train" else "validation_path"
        for name, path in PATHS.items():
            if name not in ("option", "url", "dash"):
                arguments = [f"--task.{option}={path}"]
                yield Case("row", base.name, f"{option}: {name}", _with(base, arguments))
    yield from _column_cases()


def _column_cases() -> Iterator[Case]:
    """Yield each column of each data file with each wrong value, in the first base that reads the file."""
    read: set[tuple[str, str]] = set()
    for base in bases().values():
        for file, rows in base.files.items():
            place = (base.name.partition("/")[0], file)
            if isinstance(rows, str) or place in read or file not in json.dumps(base.tree):
                continue
            read.add(place)
            for column in rows[0]:
                for name, value in COLUMN.items():
                    legal = reason_of_column(f"{file} {column}", name)
                    spoiled = json.dumps({**rows[0], column: value})
                    yield Case("column", base.name, f"{file} {column}: {name}", _with_row(base, file, spoiled), legal)
                missing = json.dumps({key: value for key, value in rows[0].items() if key != column})
                legal = reason_of_column(f"{file} {column}", "missing")
                yield Case("column", base.name, f"{file} {column}: missing", _with_row(base, file, missing), legal)


def _with(base: Base, arguments: list[str]) -> Any:
    return lambda folder: [*base.write(folder), *arguments]


def _with_row(base: Base, file: str, row: str | bytes) -> Any:
    def make(folder: Path) -> list[str]:
        arguments = base.write(folder)
        content = row if isinstance(row, bytes) else row.encode("utf-8", "surrogatepass")
        if not isinstance(row, bytes) and row.strip():
            others = base.files[file]
            assert isinstance(others, list)
            content += b"\n" + as_lines(others[1:]).encode()
        (folder / file).write_bytes(content)
        return arguments

    return make
