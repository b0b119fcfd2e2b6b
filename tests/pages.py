"""Reads README and the pages of `rlkit docs`: their blocks, the commands in them, and the files that they show."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rlkit_inspect.docs import page

from tests.conftest import ROOT

README = "README"


class Block(NamedTuple):
    """A fenced block: its page, language, text, and the file that the text before it names."""

    topic: str
    language: str
    text: str
    file: str | None


def text_of(topic: str) -> str:
    return (ROOT / "README.md").read_text(encoding="utf-8") if topic == README else page(topic)


def blocks(topic: str) -> Iterator[Block]:
    """Yield the blocks of a page; one after a paragraph that names a file in backquotes, and a colon, is that file.

    Those of README that install rlkit are left out: `.ci/run` runs them.
    """
    text = text_of(topic)
    for found in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.M | re.S):
        if found[2].startswith("python3 -m venv"):
            continue
        before = text[: found.start()].rstrip().rsplit("\n\n", 1)[-1]
        named = re.search(r"`([\w.-]+\.(?:csv|jsonl|py|yaml|sh|toml))`[,;]?(?: [^`]*(?:`path`[^`]*)?)?[:,]$", before)
        yield Block(topic, found[1], found[2], named[1] if named else None)


def commands(block: Block) -> Iterator[list[str]]:
    for line in block.text.replace("\\\n", " ").splitlines():
        yield shlex.split(line, comments=True)


def write_files(topic: str, folder: Path) -> None:
    for block in blocks(topic):
        if block.file is not None:
            (folder / block.file).write_text(block.text)


def own_example() -> list[list[str]]:
    """Return README's commands from a table and a function to a validated model."""
    lines = [words for block in blocks(README) if block.language == "bash" for words in commands(block)]
    own = [words for words in lines if {"sums.csv", "mine.yaml", "runs/mine"} & set(words)]
    assert 6 <= len(own) <= 8
    return own
