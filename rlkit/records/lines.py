"""Files of JSON lines in a run folder."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

from rlkit.base.errors import RecipeError, explain
from rlkit.base.files import open_inside
from rlkit.types import JsonObject

MAX_LINE_BYTES = 2**28

LOGP_DECIMALS = 5
"""Digits after the point of log-probs in rows that nothing learns from again, as of the trainer's."""


def nine_digits(value: float) -> float:
    """Return a float with 9 significant digits, which hold a float32 to the bit; any other value as it is."""
    return float(f"{value:.9g}") if isinstance(value, float) and value else value


def read_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, compressed or not, that are not empty, with their numbers from 1.

    Raises:
        RecipeError: The file cannot be read, is a link or no regular file, or a line is too long.
    """
    number = 0
    try:
        with open_inside(path.parent, path.name) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            while line := file.readline(MAX_LINE_BYTES):
                number += 1
                if len(line) == MAX_LINE_BYTES:
                    raise RecipeError(f"{path}, line {number} is longer than {MAX_LINE_BYTES:,} bytes")
                if line.strip():
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:
        raise RecipeError(f"{path} cannot be read after line {number}: {explain(error)}") from error


def json_rows(path: Path) -> Iterator[JsonObject]:
    """Yield the JSON lines of a file, if there is one, but for a last line that is still being written.

    Raises:
        RecipeError: The file cannot be read, or a line is no JSON; the message names the file and the line.
    """
    for number, line in read_lines(path) if os.path.exists(path) else ():
        if line.endswith(b"\n"):
            try:
                row: object = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise RecipeError(f"{path} cannot be read: line {number} is no JSON: {explain(error)}") from error
            yield row if isinstance(row, dict) else {"prompt": row}


def step_metrics(run: Path) -> list[JsonObject]:
    """Return the metrics of a run's steps.

    Raises:
        RecipeError: They cannot be read.
    """
    return [line for line in json_rows(run / "metrics.jsonl") if isinstance(line.get("step"), int)]
