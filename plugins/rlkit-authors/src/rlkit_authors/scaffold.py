"""`rlkit plugins new`: a package with a working part, verb or recipe, from the templates beside this file.

`pyproject.toml.tmpl` and `README.md.tmpl` are shared; `<kind>.tmpl` has a summary, then sections. Those of a part are
`recipe`, `part` and `test`, which `part.md.tmpl`, `module.py.tmpl` and `test.py.tmpl` frame.
"""

from __future__ import annotations

import argparse
import keyword
import os
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import NamedTuple

from rlkit.base.errors import RecipeError
from rlkit.base.text import similar
from rlkit.base.verbs import VERBS
from rlkit.hooks import KINDS
from rlkit.registry import load_plugins

HERE = Path(__file__).parent / "templates"
LOSSES = ("sequence-loss", "pair-loss", "score-loss")
"""Kinds of losses beside that of tokens, which is `loss`."""
PLURALS = {kind.name: plural for plural, kind in KINDS.items()} | dict.fromkeys(LOSSES, "losses")
WRITTEN = [*PLURALS, "command", "recipe"]
"""What a new package can offer."""
PREFIX = "rlkit-"


class PackageNames(NamedTuple):
    """What a package's parts are called: `rlkit-my-tool` has the plugin `my-tool` and the class `MyTool`."""

    name: str
    plugin: str
    module: str
    cls: str


def new(argv: Sequence[str]) -> Path:
    """Write the package that the command line asks for; return its folder."""
    parser = argparse.ArgumentParser(prog="rlkit plugins new", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("name", metavar="NAME", help="The distribution's name, such as rlkit-my-tool.")
    parser.add_argument("--kind", choices=WRITTEN, required=True, help="What the plugin offers.")
    parser.add_argument("--out", metavar="DIR", help="The package's folder; NAME by default.")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise RecipeError(f"rlkit plugins new: {error}") from error
    if unknown:
        name = unknown[0].partition("=")[0]
        raise RecipeError(f"unknown option {name!r}; {similar(name, ['--kind', '--out'], 'expected')}")
    return scaffold(options.name, options.kind, Path(options.out or options.name))


def scaffold(name: str, kind: str, out: Path) -> Path:
    """Write a package that offers one thing of a kind; return its folder.

    Raises:
        RecipeError: The name cannot be used, or the folder is not empty.
    """
    names = names_of(name)
    summary, *parts = re.split(r"^==== (\w+)\n", _read(kind), flags=re.M)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    _check_free(names, kind, sections.get("part", ""))
    if os.path.exists(out) and (not os.path.isdir(out) or any(out.iterdir())):
        raise RecipeError(f"{out} exists and is not an empty folder; choose a new one with --out DIR")
    values = {**names._asdict(), "summary": summary.strip(), "kind": kind, "group": "rlkit", "object": names.module}
    if kind == "command":
        values |= {"group": '"rlkit.commands"', "object": f"{names.module}:run"}
    for path, text in _files(names, kind, values, sections).items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(f"{text.strip()}\n", encoding="utf-8")
    return out


def _files(names: PackageNames, kind: str, values: dict[str, str], sections: dict[str, str]) -> dict[str, str]:
    """Return the texts of a package's files by path."""
    filled = {section: Template(text).substitute(values).strip() for section, text in sections.items()}
    if kind in PLURALS:
        frames = {"code": "module.py", "test": "test.py", "use": "part.md"}
        filled |= {section: Template(_read(frame)).substitute(values | filled) for section, frame in frames.items()}
    files = {
        "pyproject.toml": Template(_read("pyproject.toml")).substitute(values),
        "README.md": Template(_read("README.md")).substitute(values | filled),
        f"src/{names.module}/__init__.py": filled["code"],
        f"tests/test_{names.module}.py": filled["test"],
    }
    if "file" in filled:
        files[f"src/{names.module}/recipes/{names.plugin}.yaml"] = filled["file"]
    return files


def names_of(name: str) -> PackageNames:
    """Derive a package's names from its distribution's.

    Raises:
        RecipeError: It is not in lower case with dashes, or cannot name a module and a class.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", name):
        fixed = re.sub(r"[^a-z0-9]+", "-", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", name).lower()).strip("-")
        hint = fixed if re.match("[a-z]", fixed) else f"{PREFIX}my-tool"
        raise RecipeError(f"NAME is {name!r}, expected lower-case words joined by dashes, such as {hint}")
    plugin, module = name.removeprefix(PREFIX), name.replace("-", "_")
    cls = "".join(word.capitalize() for word in plugin.split("-"))
    if not cls.isidentifier() or keyword.iskeyword(module) or keyword.iskeyword(cls):
        raise RecipeError(f"NAME is {name!r}, which names no class of Python ({cls}); try {PREFIX}my-{plugin}")
    return PackageNames(name, plugin, module, cls)


def _check_free(names: PackageNames, kind: str, part: str) -> None:
    """Refuse names that something else has: the package could not be imported, or not be loaded beside it."""
    if find_spec(names.module) is not None:
        raise RecipeError(
            f"NAME is {names.name!r}, but there is a module {names.module} already; uninstall it or choose another name"
        )
    registry = load_plugins(entry_points=False)
    if kind == "command":
        in_use, what = names.plugin in VERBS, f"the verb {names.plugin!r}"
    elif kind == "recipe":
        in_use, what = names.plugin in registry.recipes, f"a recipe {names.plugin!r}"
    else:
        in_use, what = (
            names.cls in registry.parts[PLURALS[kind]] or bool(re.search(rf"\b{names.cls}\b", part)),
            names.cls,
        )
    if in_use:
        raise RecipeError(f"NAME is {names.name!r}, but rlkit has {what} itself; try {PREFIX}my-{names.plugin}")


def _read(template: str) -> str:
    return (HERE / f"{template}.tmpl").read_text(encoding="utf-8")
