"""Reading rows from text files: JSON lines, CSV and TSV, each row with its location."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from rlkit.base.errors import RecipeError, UnavailableError, show, unreachable
from rlkit.base.text import redact
from rlkit.tasks.table import LocatedRow
from rlkit.types import Row

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of packed files, after that of the format."""


def is_url(name: str) -> bool:
    """Whether a name is a URL, which fsspec opens, instead of a path."""
    return "://" in name


def suffix_of(name: str) -> str:
    """Return the suffix of a file's format, which that of a compression may follow."""
    path = PurePosixPath(urlsplit(name).path if is_url(name) else name)
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def jsonl(name: str) -> list[LocatedRow]:
    """Read a file with one JSON object a line, in UTF-8.

    Raises:
        RecipeError: A line is not such an object; the message names the file and the line.
    """
    rows = [LocatedRow.at(location, _parse(line, location)) for location, line in _lines(name) if line.strip()]
    for row in rows:
        row.as_written = True
    return rows


def separated(name: str) -> list[LocatedRow]:
    """Read a CSV or TSV file in UTF-8, whose first line has the columns' names; all fields are texts.

    Raises:
        RecipeError: A row has more or fewer fields; the message names the file and the line.
    """
    csv.field_size_limit(2**31 - 1)
    lines = (line for _, line in _lines(name))
    reader = csv.DictReader(lines, delimiter="\t" if suffix_of(name) == ".tsv" else ",", strict=True)
    rows = []
    try:
        columns = reader.fieldnames or []
        repeated = [column for column, count in Counter(columns).items() if count > 1]
        if repeated:
            raise RecipeError(f"{redact(name)}, line 1: several columns are named {repeated[0]!r}; rename all but one")
        for row in reader:
            location = f"{redact(name)}, line {reader.line_num}"
            if None in row or None in row.values():
                count = len(columns) - list(row.values()).count(None) + len(row.get(None, ()))  # type: ignore[call-overload]
                raise RecipeError(f"{location}: {count} fields, expected {len(columns)}: {', '.join(columns)}")
            rows.append(LocatedRow.at(location, row))
    except csv.Error as error:
        raise RecipeError(f"{redact(name)}, after line {reader.line_num}: not a row of a CSV file ({error})") from error
    return rows


def _lines(name: str) -> Iterator[tuple[str, str]]:
    """Read the lines of a text file, each with its location."""
    import fsspec

    try:
        with fsspec.open(name if is_url(name) else str(Path(name).absolute()), "rb", compression="infer") as raw:
            file = io.BufferedReader(raw) if is_url(name) else raw  # a stream cannot step back to the start of a line
            for number, line in enumerate(file, 1):
                location = f"{redact(name)}, line {number}"
                yield location, _decode(line, number, location)
    except RecipeError:
        raise
    except Exception as error:  # file systems and unpackers have many of their own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        kind = UnavailableError if is_url(name) and unreachable(error) else RecipeError
        raise kind(f"{redact(name)} cannot be read: {redact(reason)}") from error


def _decode(line: bytes, number: int, location: str) -> str:
    if number == 1 and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise RecipeError(f"{location}: the file is in UTF-16, expected UTF-8; convert it: iconv -f UTF-16 -t UTF-8")
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{location}: byte 0x{line[error.start]:02x} in column {error.start + 1} is not UTF-8, expected a text "
            "file in UTF-8; if it is text in another encoding, convert it: iconv -f LATIN1 -t UTF-8"
        ) from error
    if "\0" in text:
        raise RecipeError(f"{location}: a NUL byte, expected text")
    return text


def _parse(line: str, location: str) -> Row:
    try:
        row = json.loads(line)
        if "\\ud" in line.lower():
            json.dumps(row, ensure_ascii=False).encode()  # half of a surrogate pair is JSON, but no text
    except UnicodeEncodeError as error:
        surrogate = error.object[error.start : error.end]
        raise RecipeError(
            f"{location}: {surrogate!a} is half of a surrogate pair, which is not valid text; remove it, or write the "
            "character in UTF-8"
        ) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError
        raise RecipeError(f"{location}: not JSON ({first_line(error)}); expected one object a line") from error
    if not isinstance(row, dict):
        raise RecipeError(f'{location}: {show(row)}, expected one JSON object a line, such as {{"prompt": "2 + 2?"}}')
    return row


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its type's name."""
    text = str(error).strip()
    return text.split("\n")[0] if text else type(error).__name__
