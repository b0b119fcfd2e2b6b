"""The table of references and answers in `data/math_forms.txt`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

TABLE = Path(__file__).with_name("data") / "math_forms.txt"


CONTROLS = str.maketrans({"⏎": "\n", "␍": "\r", "␣": "\N{ZERO WIDTH SPACE}"})
PREFIXES = ("@ ", "+ ", "- ", "+:", "-:", "? ")


class Case(NamedTuple):
    """An answer to a reference of a form, and whether it is right."""

    form: str
    reference: str
    text: str
    right: bool


def cases() -> list[Case]:
    """Return the answers of the table as complete texts."""
    form, reference, table = "", "", []
    for line in _lines():
        if line.startswith("@ "):
            form, _, reference = line[2:].partition(" | ")
        elif line[0] in "+-":
            text = line[3:] if line[1:2] == ":" else f"#### {line[2:]}"
            table.append(Case(form, reference, text, line[0] == "+"))
    return table


def references() -> list[tuple[str, str]]:
    """Return each form and its reference."""
    heads = [line[2:].partition(" | ") for line in _lines() if line.startswith("@ ")]
    return [(form, reference) for form, _, reference in heads]


def refused() -> list[str]:
    """Return the references that are refused."""
    return [line[2:] for line in _lines() if line.startswith("?")]


def _lines() -> list[str]:
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    return [line.translate(CONTROLS) for line in lines if line[:2] in PREFIXES]
