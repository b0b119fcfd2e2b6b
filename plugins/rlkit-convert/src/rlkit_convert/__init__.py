"""`rlkit convert`: prints the rlkit recipe that is equivalent to a configuration of another system."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit.hooks import Register, hookimpl
from rlkit_convert.tool import AnswerScore

if TYPE_CHECKING:
    from rlkit_convert.conversion import Conversion

__all__ = ["AnswerScore", "convert", "run"]


def run(argv: Sequence[str]) -> int:
    """Convert a file and print its recipe; return the exit status."""
    from rlkit_convert import command

    return command.run(argv)


def convert(peer: str, content: str, name: str, overrides: Sequence[str]) -> Conversion:
    """Return the conversion of a file's text, with options that override those in it."""
    from rlkit_convert import command

    return command.convert(peer, content, name, overrides)


@hookimpl
def rlkit_register(register: Register) -> None:
    register(AnswerScore)
