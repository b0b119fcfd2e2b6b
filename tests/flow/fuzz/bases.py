"""The legal recipes that cases begin with: one file each, with its data, and variants with other parts."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
Key = tuple[str | int, ...]
Spec = dict[str, Any]


@dataclass(frozen=True)
class Base:
    """A legal recipe.

    Args:
        name: The file, and the variant.
        tree: The recipe.
        files: What its data files hold, by name: rows, or a text.
    """

    name: str
    tree: Spec
    files: dict[str, list[Spec] | str]

    def write(self, folder: Path, recipe: str | bytes | Spec | None = None) -> list[str]:
        """Write the data files and a recipe, by default the legal one; return the arguments that name it."""
        for name, content in self.files.items():
            (folder / name).write_text(content if isinstance(content, str) else as_lines(content))
        content = self.tree if recipe is None else recipe
        raw = content if isinstance(content, str | bytes) else yaml.safe_dump(content)
        raw = raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogatepass")
        (folder / "recipe.yaml").write_bytes(raw)
        return ["--recipe", "recipe.yaml"]

    def options(self) -> Iterator[tuple[str, Key, Any]]:
        """Yield each section, option and item: its name, the key, the value."""
        return _options(self.tree, (), "")

    def columns(self) -> dict[str, list[str]]:
        """Return the columns of each data file, as its first row has them."""
        return {name: list(rows[0]) for name, rows in self.files.items() if not isinstance(rows, str)}

    def spoiled(self, key: Key, value: Any) -> Spec:
        """Return the recipe with another value at a key."""
        tree = copy.deepcopy(self.tree)
        section: Any = tree
        for part in key[:-1]:
            section = section[part]
        section[key[-1]] = value
        return tree


def as_lines(rows: list[Spec]) -> str:
    """Return rows as JSON lines."""
    return "".join(json.dumps(row) + "\n" for row in rows)


@cache
def bases() -> dict[str, Base]:
    """Return all bases by name: each file's, then its variants."""
    variants = yaml.safe_load((HERE / "variants.yaml").read_text())
    every = {}
    for path in sorted((HERE / "bases").glob("*.yaml")):
        given, tree = yaml.safe_load_all(path.read_text())
        every[path.stem] = Base(path.stem, tree, given["files"])
        for name, sections in variants.get(path.stem, {}).items():
            every[f"{path.stem}/{name}"] = Base(f"{path.stem}/{name}", {**tree, **sections}, given["files"])
    return every


def _options(value: Any, key: Key, owner: str) -> Iterator[tuple[str, Key, Any]]:
    """Yield what is in a section; options of a class are called `Class.option`, wherever it is."""
    if isinstance(value, dict) and "class_path" in value:
        owner = value["class_path"]
    if isinstance(value, dict):
        items: Any = value.items()
    else:
        items = enumerate(value) if isinstance(value, list) and any(isinstance(v, dict) for v in value) else ()
    for name, child in items:
        option = owner if name == "init_args" else f"{owner}.{name}".lstrip(".")
        yield (f"{option}.init_args" if name == "init_args" else option), (*key, name), child
        yield from _options(child, (*key, name), option)
