"""Printing that cannot fail: a reader that is gone, a full disk or a poor encoding never ends what is being done."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TextIO


class UnfailingStream:
    """A text stream whose writes never raise.

    A character that the encoding lacks becomes `?`. Once a write fails because the reader has gone, or the disk is
    full, the descriptor goes to the null device: everything else that prints there, libraries and children included,
    goes on silently.

    Args:
        stream: What is wrapped.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            try:
                return self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding or "ascii"
                return self._stream.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError):  # ValueError: it is closed
            self._silence()
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            self._silence()

    def _silence(self) -> None:
        try:
            number = self._stream.fileno()
        except (OSError, ValueError):  # no descriptor, or closed
            return
        with open(os.devnull, "w", encoding="utf-8") as null:
            os.dup2(null.fileno(), number)


@contextmanager
def unfailing() -> Iterator[None]:
    """Make `sys.stdout` and `sys.stderr` streams whose writes never raise."""
    before = sys.stdout, sys.stderr
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        pass  # a standard descriptor was closed: no file of the run may get its number
    os.close(number)
    sys.stdout, sys.stderr = (UnfailingStream(s or open(os.devnull, "w", encoding="utf-8")) for s in before)  # type: ignore[assignment]  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before
