"""Printing for people: texts and tables as they are, whoever wrote them, made safe for a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from rlkit.base.errors import shorten
from rlkit.base.text import safe

LONGEST = 20_000
"""Characters of a text that are shown."""
CONTEXT, TRAINED = "cyan", "bold green"
"""Styles of what a policy reads, and of what it is trained to write."""


def echo(text: str, *, error: bool = False) -> None:
    """Print a text as it is, whoever wrote it: no markup, no control codes, no credentials."""
    print(printable(text), file=sys.stderr if error else sys.stdout)


def printable(text: str) -> str:
    """Escape a text for a terminal."""
    return safe(shorten(text, LONGEST))


def echo_spans(spans: Iterable[Mapping[str, Any]]) -> None:
    """Print spans of a text that are trained or context in two colours; without colours, trained ones in ⟦brackets⟧."""
    console, line = Console(highlight=False), Text()
    for span in spans:
        text = printable(span["text"])
        in_brackets = span["trained"] and console.color_system is None
        line.append(f"⟦{text}⟧" if in_brackets else text, TRAINED if span["trained"] else CONTEXT)
    console.print(line, soft_wrap=True)


def cell(text: str) -> Text:
    """Return a text as a table's cell: no markup, no control codes, no credentials."""
    return Text(printable(text))


def show(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table."""
    Console().print(make_table(header, rows))


def show_list(rows: Iterable[tuple[str, str]]) -> None:
    """Print names with their descriptions: a line each, which a terminal wraps beside the names."""
    console, entries = Console(), [(printable(name), printable(text)) for name, text in rows]
    if not console.is_terminal:
        width = max((len(name) for name, _ in entries), default=0)
        for name, text in entries:
            print(f"{name:<{width}} {text}")
        return
    table = Table.grid(Column(no_wrap=True), Column(), padding=(0, 1))
    for name, text in entries:
        table.add_row(Text(name), Text(text))
    console.print(table)


def make_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Return a table whose texts are shown literally and whole: a word that is wider than its column is folded."""
    table = Table(*(Column(name, overflow="fold") for name in header), show_edge=False)
    for row in rows:
        table.add_row(*map(cell, row))
    return table
