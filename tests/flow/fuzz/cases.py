"""Cases: one spoiled thing each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Make = Callable[[Path], list[str]]


@dataclass(frozen=True)
class Case:
    """One thing that is wrong.

    Args:
        kind: What is spoiled.
        base: The name of the legal recipe that it begins with.
        name: What is wrong.
        make: Writes files into a folder, the current one, and returns the command line.
        legal: Why it may be accepted; None if it must be refused.
    """

    kind: str
    base: str
    name: str
    make: Make
    legal: str | None = None

    def __str__(self) -> str:
        return f"{self.kind} of {self.base}: {self.name}"
