"""Text files with rows: JSON lines, CSV and TSV, packed or not; where each row is, and what it says."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO
from urllib.parse import urlsplit

from rlkit.base.errors import RecipeError, UnavailableError, show, unreachable
from rlkit.base.files import is_url
from rlkit.base.text import redact
from rlkit.types import Row

COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
"""Suffixes of packed files, after that of the format."""

LONGEST_HEADER = 2**20
"""Bytes of a CSV file's first line that are searched for what separates its columns."""

LONGEST_FIELD = 2**31 - 1
"""Characters of a field in a CSV file; Python's own limit, which is the process's, is 131,072."""


def is_packed(name: str) -> bool:
    """Whether a name is that of a packed file."""
    return PurePosixPath(name).suffix in COMPRESSED


def suffix_of(name: str) -> str:
    """Return the suffix of a file's format, which that of a compression may follow."""
    path = PurePosixPath(urlsplit(name).path if is_url(name) else name)
    return PurePosixPath(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def delimiter_of(name: str) -> str | None:
    """Return the text between the columns of a text file; None for JSON lines.

    Spreadsheets write `.csv` with semicolons where the comma is the decimal sign: a first line without a comma says so.

    Raises:
        RecipeError: It cannot be read.
    """
    suffix = suffix_of(name)
    if suffix != ".csv":
        return {".jsonl": None, ".tsv": "\t"}[suffix]
    with opened(name) as file:
        first = next((line for line in iter(lambda: file.readline(LONGEST_HEADER), b"") if line.strip()), b"")
    unquoted = re.sub(rb'"[^"]*"', b"", first).decode(errors="replace")
    return next((mark for mark in ",;\t" if mark in unquoted), ",")


@contextmanager
def opened(name: str) -> Iterator[BinaryIO]:
    """Open a text file, packed or not, to read its bytes.

    Args:
        name: A path, or a URL.

    Raises:
        RecipeError: It cannot be read, or what reads it meanwhile raised another error.
    """
    import fsspec

    try:
        with fsspec.open(name if is_url(name) else str(Path(name).absolute()), "rb", compression="infer") as file:
            yield file
    except RecipeError:
        raise
    except Exception as error:  # file systems and unpackers have many of their own
        reason = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        kind = UnavailableError if is_url(name) and unreachable(error) else RecipeError
        raise kind(f"{redact(name)} cannot be read: {redact(reason)}") from error


def lines_with_text(lines: Iterable[bytes]) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, end and number of each line that has more than white space."""
    start = 0
    for number, line in enumerate(lines, 1):
        if line.strip() and line.strip() != codecs.BOM_UTF8:
            yield start, start + len(line), number
        start += len(line)


def separated_rows(lines: Iterable[bytes], delimiter: str, name: str) -> Iterator[tuple[int, int, int]]:
    """Yield first byte, end and last line of each row of a CSV file, the columns' names first; none is empty.

    Args:
        lines: The file's.
        delimiter: Between two columns.
        name: Of the file, for messages.

    Raises:
        RecipeError: The file is no such table, or not in UTF-8; the message names the line.
    """
    start = end = last_line = 0

    def texts() -> Iterator[str]:
        nonlocal end
        for number, line in enumerate(lines, 1):
            end += len(line)
            yield decoded(line, number == 1, f"{name}, line {number}")

    csv.field_size_limit(LONGEST_FIELD)
    reader = csv.reader(texts(), delimiter=delimiter, strict=True)
    try:
        for row in reader:
            if row:
                yield start, end, reader.line_num
            start, last_line = end, reader.line_num
    except csv.Error as error:
        raise RecipeError(f"{name}, after line {last_line}: not a row of a CSV file ({error})") from error


def header(text: str, delimiter: str, location: str) -> list[str]:
    """Return the names of a CSV file's columns.

    Raises:
        RecipeError: Two are equal.
    """
    columns = fields(text, delimiter)
    repeated = [column for column, count in Counter(columns).items() if count > 1]
    if repeated:
        raise RecipeError(f"{location}: several columns are named {repeated[0]!r}; rename all but one")
    return columns


def fields(text: str, delimiter: str) -> list[str]:
    """Return the fields of one row of a CSV file."""
    csv.field_size_limit(LONGEST_FIELD)
    return next(csv.reader([text], delimiter=delimiter, strict=True))


def decoded(line: bytes, first: bool, location: str) -> str:
    """Return the text of a line, or of a row of several lines.

    Args:
        line: Its bytes.
        first: Whether it is the first of a file.
        location: For messages.

    Raises:
        RecipeError: It is not in UTF-8.
    """
    if first and line.startswith((b"\xff\xfe", b"\xfe\xff")):
        problem = f"{location}: the file is in UTF-16, expected UTF-8"
        raise RecipeError(f"{problem}; convert it: iconv -f UTF-16 -t UTF-8 FILE > NEW")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            f"{location}: byte 0x{line[error.start]:02x} in column {error.start + 1} is not UTF-8, expected a text "
            "file in UTF-8; if it is text in another encoding, convert it, such as by "
            "iconv -f CP1252 -t UTF-8 FILE > NEW, or save it as UTF-8 where it was written"
        ) from error
    if "\0" in text:
        raise RecipeError(f"{location}: a NUL byte, expected text")
    return text


def parsed(line: str, location: str) -> Row:
    """Return the JSON object in a line.

    Raises:
        RecipeError: There is something else.
    """
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
