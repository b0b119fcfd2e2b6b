"""Command lines that are wrong, and names of the user's own that can be no file, column or metric."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import yaml

from tests.flow.fuzz.bases import HERE, Base, Key, Spec, bases
from tests.flow.fuzz.cases import Case, Make
from tests.flow.fuzz.texts import bomb, nested

GENERATED = {
    "an option 50 times": ["--reward=[" * 50],
    "3,000 lists": ["--train=" + "[" * 3000],
    "3,000 mappings": ["--train=" + "{a: " * 3000],
    "5,000 digits": ["--train.lr=" + "9" * 5000],
    "an alias bomb": ["--train=" + bomb(9)],
    "60 nested rewards": ["--reward=" + json.dumps(nested(60))],
    "60 nested rewards as two words": ["--reward", json.dumps(nested(60))],
    "7 nested rewards": ["--reward=" + json.dumps(nested(7))],
}
NAMES = {
    "a path upwards": "../x",
    "an absolute path": "/etc/x",
    "a newline": "a\nb",
    "a tab": "a\tb",
    "NUL": "a\0b",
    "300 long": "n" * 300,
    "empty": "",
    "a comma": "a,b",
    "a quote": 'a"b',
    "an escape": "\x1b[2J",
    "a backslash": "a\\b",
    "text from right to left": "a\u202eb",
}
NO_FILES = (
    ".",
    "..",
    "metrics.jsonl",
    "recipe.yaml",
    "result.json",
    "lock",
    "checkpoints",
    "rollouts",
    "final",
    "profile",
)
"""What is no file of a logger: folders, and what a run folder holds."""
NAMED: dict[str, list[Key]] = {
    "grpo": [("mix",), ("tools",), ("reward", "init_args", "rewards")],
    "ppo": [("validation", "tasks")],
}
"""Mappings whose names become columns, metrics or what the policy reads, by the base."""


def argument_cases() -> Iterator[Case]:
    """Yield command lines that are wrong."""
    lines: dict[str, str] = yaml.safe_load((HERE / "arguments.yaml").read_text())
    for name, text in lines.items():
        for line in text.splitlines():
            words, _, legal = line.partition("  # ")
            yield Case("arguments", name, words, _with(bases()[name], shlex.split(words)), legal or None)
    for name, generated in GENERATED.items():
        yield Case("arguments", "grpo", name, _with(bases()["grpo"], generated))


def name_cases() -> Iterator[Case]:
    """Yield an entry under each hostile name in each mapping, and loggers' files of such names."""
    for base_name, keys in NAMED.items():
        for key in keys:
            for what, name in NAMES.items():
                yield Case("name", base_name, f"{key[-1]}: {what}", _named(bases()[base_name], key, name))
    base, file = bases()["ppo"], ("log", "loggers", 0, "init_args", "file")
    for what, name in (NAMES | dict(zip(NO_FILES, NO_FILES, strict=True))).items():
        yield Case("name", base.name, f"CSV.file: {what}", _recipe(base, base.spoiled(file, name)))


def _with(base: Base, words: list[str]) -> Make:
    return lambda folder: [*base.write(folder), *words]


def _recipe(base: Base, tree: Spec) -> Make:
    return lambda folder: base.write(folder, tree)


def _named(base: Base, key: Key, name: str) -> Make:
    """Add an entry to a mapping: its first one under another name."""
    section: Any = base.tree
    for part in key:
        section = section[part]
    return _recipe(base, base.spoiled(key, {**section, name: next(iter(section.values()))}))
