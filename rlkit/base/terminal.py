"""Printing for people: texts and tables as they are, whoever wrote them, made safe for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlkit.base.errors import shorten
from rlkit.base.text import safe

LONGEST = 20_000
"""Characters of a text that are shown."""


def echo(text: str, *, error: bool = False) -> None:
    """Print a text as it is, whoever wrote it: no markup, no control codes, no credentials."""
    print(printable(text), file=sys.stderr if error else sys.stdout)


def printable(text: str) -> str:
    """Escape a text for a terminal."""
    return safe(shorten(text, LONGEST))


def cell(text: str) -> Text:
    """Return a text as a table's cell: no markup, no control codes, no credentials."""
    return Text(printable(text))


def show(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    Console().print(make_table(header, rows))


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose texts are shown literally and whole: a word that is wider than its column is folded."""
    table = Table(*(Column(name, overflow="fold") for name in header), show_edge=False)
    for row in rows:
        table.add_row(*map(cell, row))
    return table
