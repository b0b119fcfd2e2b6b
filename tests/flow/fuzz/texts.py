"""Recipes that are no YAML or no recipe, paths that name none, and bytes changed at random."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any

import yaml

from tests.flow.fuzz.bases import HERE, bases
from tests.flow.fuzz.cases import Case

RECIPE = (HERE / "bases" / "grpo.yaml").read_text().partition("\n---\n")[2]


def bomb(levels: int) -> str:
    """Return YAML whose aliases stand for 9**levels values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, levels)]
    return "\n".join([*lines, f"train: *a{levels - 1}"])


def nested(levels: int) -> dict[str, Any]:
    """Return a reward inside a reward inside …"""
    reward: dict[str, Any] = {"class_path": "MathReward"}
    for _ in range(levels):
        reward = {"class_path": "Composite", "init_args": {"rewards": {"a": reward}}}
    return reward


FILES: dict[str, str | bytes] = {
    "empty": "",
    "blank": "\n\n  \n",
    "a number": "5",
    "a text": "train",
    "a list": "- train",
    "null": "null",
    "NaN": ".nan",
    "unclosed": "train: {steps: 2",
    "unclosed quote": 'model: {path: "tiny}',
    "tab": "train:\n\tsteps: 2",
    "two documents": f"{RECIPE}\n---\n{RECIPE}",
    "no colon": "train\nsteps 2",
    "bad indent": "train:\n  steps: 2\n lr: 1",
    "duplicate section": f"{RECIPE}\ntrain: {{steps: 3}}",
    "duplicate key": RECIPE.replace("steps: 2", "steps: 2\n  steps: 3"),
    "unknown alias": "train: *nosuch",
    "tag": "train: !!python/object/apply:os.system [ls]",
    "own tag": "train: !mine {a: 1}",
    "binary tag": "train: !!binary aGVsbG8=",
    "set": "train: !!set {a, b}",
    "date": f"{RECIPE}\nsave: 2024-13-45",
    "a date for a number": RECIPE.replace("steps: 2", "steps: 2024-01-01"),
    "number keys": f"{RECIPE}\n5: 6",
    "list as key": f"{RECIPE}\n? [a, b]\n: c",
    "null key": f"{RECIPE}\n? \n: c",
    "3,000 deep": "train: " + "[" * 3000 + "]" * 3000,
    "3,000 deep unclosed": "[" * 3000,
    "3,000 deep mappings": "".join("{" + f"a{n}: " for n in range(3000)) + "1" + "}" * 3000,
    "alias bomb": bomb(9),
    "small alias bomb": bomb(4),
    "itself": "train: &a {steps: *a}",
    "itself in a list": "train: &a [*a]",
    "itself at the top": "&a {train: *a}",
    "merge of itself": "train: &a {<<: *a, steps: 2}",
    "merge of a number": "train: {<<: 5, steps: 2}",
    "60 nested rewards": yaml.safe_dump({"reward": nested(60)}),
    "10 nested rewards": yaml.safe_dump({"reward": nested(10)}),
    "5,000 digits": RECIPE.replace("steps: 2", "steps: " + "9" * 5000),
    "5,000 digits as text": RECIPE.replace("steps: 2", f"steps: '{'9' * 5000}'"),
    "hex": RECIPE.replace("steps: 2", "steps: 0xZZ"),
    "UTF-16": RECIPE.encode("utf-16"),
    "UTF-16 without mark": RECIPE.encode("utf-16-le"),
    "UTF-32": RECIPE.encode("utf-32"),
    "latin-1": RECIPE.replace("Be brief", "S\xe9rieux").encode("latin-1"),
    "binary": bytes(range(256)) * 8,
    "NUL": b"\0" * 100,
    "ELF": b"\x7fELF" + os.urandom(64),
    "gzip": b"\x1f\x8b\x08" + bytes(60),
    "control": RECIPE.replace("Be", "\x07Be"),
    "surrogate": RECIPE.replace("Be brief.", "'\ud800'"),
    "2 MB": "# " + "x" * 2**21,
    "JSON": "{]",
    "100,000 keys": "{" + ", ".join(f"k{n}: {n}" for n in range(100_000)) + "}",
    "a long key": f"{'k' * 5000}: 1",
    "percent": "%YAML 9.9\n---\na: 1",
    "only a comment": "# nothing",
    "print_config": f"{RECIPE}\nprint_config: true",
    "recipe in recipe": f"{RECIPE}\nrecipe: other.yaml",
    "help": f"{RECIPE}\nhelp: true",
    "class text": f"{RECIPE}\ncritic: GAE",
}
LEGAL_FILES: dict[str, str | bytes] = {
    "BOM": b"\xef\xbb\xbf" + RECIPE.encode(),
    "a word for true as key": RECIPE.replace("tools: {calc:", "tools: {on:"),
    "DOS": RECIPE.replace("\n", "\r\n"),
    "carriage returns": RECIPE.replace("\n", "\r"),
    "anchor": RECIPE.replace("steps: 2", "steps: &n 2").replace("limit: 2", "limit: *n"),
    "JSON recipe": json.dumps(yaml.safe_load(RECIPE)),
    "document mark": f"---\n{RECIPE}...\n",
    "umlaut": RECIPE.replace("Be brief", "K\xfcrzer \u2603"),
}
PATHS = {
    "a folder": ".",
    "a device": "/dev/zero",
    "a terminal": "/dev/tty",
    "random": "/dev/urandom",
    "null": "/dev/null",
    "a pipe": "pipe",
    "missing": "nosuch.yaml",
    "empty": "",
    "long": "n" * 5000,
    "NUL": "a\0b",
    "memory": "/proc/self/mem",
    "link to itself": "loop",
    "link to nothing": "dangling",
    "surrogate": "\udc80.yaml",
    "user": "~nosuch/x.yaml",
    "url": "http://127.0.0.1:9/x.yaml",
    "dash": "-",
    "option": "--train.steps=2",
}


def text_cases() -> Iterator[Case]:
    """Yield recipe files that are broken, and paths that name no recipe."""
    base = bases()["grpo"]
    for name, text in (FILES | LEGAL_FILES).items():
        legal = "YAML in UTF-8" if name in LEGAL_FILES else None
        yield Case("text", base.name, name, lambda folder, text=text: base.write(folder, text), legal)
    for name, path in PATHS.items():
        yield Case("path", base.name, name, lambda folder, path=path: ["--recipe", path])


def noise_cases(count: int, rng: random.Random) -> Iterator[Case]:
    """Yield legal recipes with some bytes changed at random, each base in turn."""
    every = list(bases().values())
    for number in range(count):
        base = every[number % len(every)]
        raw = bytearray(yaml.safe_dump(base.tree).encode())
        for _ in range(rng.randint(1, 4)):
            _change(raw, rng)
        yield Case(
            "noise",
            base.name,
            str(number),
            lambda folder, raw=bytes(raw), base=base: base.write(folder, raw),
            "noise may leave a legal recipe",
        )


def _change(raw: bytearray, rng: random.Random) -> None:
    start = rng.randrange(len(raw))
    match rng.randrange(4):
        case 0:
            raw[start] = rng.choice(b"{}[]:,&*!|>'\"%@`#-\t\n 0aZ.\xff\x00")
        case 1:
            del raw[start : start + rng.randint(1, 8)]
        case 2:
            raw[start:start] = rng.choice((b"{", b"[", b"&a ", b"*a", b": ", b"\n", b"!!int ", b"- ", b"null", b"\xe9"))
        case _:
            raw[start:start] = raw[start : start + rng.randint(1, 40)]
