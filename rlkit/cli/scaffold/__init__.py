"""`rlkit plugins new`: a package with a working part, from the templates beside this file.

`pyproject.toml.tmpl`, `README.md.tmpl`, `module.py.tmpl` and `test.py.tmpl` are shared; `<kind>.tmpl` has what differs:
a summary, then the sections `recipe`, `part` and `test`.
"""

from __future__ import annotations

import argparse
import keyword
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import NamedTuple

from rlkit.errors import RecipeError
from rlkit.hooks import KINDS
from rlkit.registry import load_plugins

HERE = Path(__file__).parent
PLURALS = {kind.name: plural for plural, kind in KINDS.items()}
"""What can be made."""
PREFIX = "rlkit-"


class Names(NamedTuple):
    """What a package's parts are called: `rlkit-my-tool` has the plugin `my-tool` and the class `MyTool`."""

    name: str
    plugin: str
    module: str
    cls: str


def new(argv: Sequence[str]) -> Path:
    """Write a package as the command line says; give its folder."""
    parser = argparse.ArgumentParser(prog="rlkit plugins new", allow_abbrev=False, exit_on_error=False)
    parser.add_argument("name", metavar="NAME", help="The distribution's name, such as rlkit-my-tool.")
    parser.add_argument("--kind", choices=PLURALS, required=True, help="What the plugin offers.")
    parser.add_argument("--out", metavar="DIR", help="The package's folder; NAME by default.")
    try:
        options, unknown = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise RecipeError(f"rlkit plugins new: {error}") from error
    if unknown:
        raise RecipeError(f"rlkit plugins new was given {unknown[0]!r}, expected NAME, --kind and --out")
    return scaffold(options.name, options.kind, Path(options.out or options.name))


def scaffold(name: str, kind: str, out: Path) -> Path:
    """Write a package that offers one part of a kind; give its folder.

    Raises:
        RecipeError: The name does not do, or the folder holds something.
    """
    names = names_of(name)
    summary, *sections = re.split(r"^==== \w+\n", _read(kind), flags=re.M)
    _check_free(names, kind, sections[1])
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"{out} exists and is not an empty folder; choose a new one with --out DIR")
    values = {**names._asdict(), "summary": summary.strip(), "kind": kind}
    recipe, part, test = (Template(section).substitute(values).strip() for section in sections)
    values |= {"recipe": recipe, "part": part, "test": test}
    for template, path in (
        ("pyproject.toml", "pyproject.toml"),
        ("README.md", "README.md"),
        ("module.py", f"src/{names.module}/__init__.py"),
        ("test.py", f"tests/test_{names.module}.py"),
    ):
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text(Template(_read(template)).substitute(values), encoding="utf-8")
    return out


def names_of(name: str) -> Names:
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
    return Names(name, plugin, module, cls)


def _check_free(names: Names, kind: str, part: str) -> None:
    """Refuse names that something else has: the package could not be imported, or not be loaded beside it."""
    if find_spec(names.module) is not None:
        raise RecipeError(
            f"NAME is {names.name!r}, but there is a module {names.module} already; uninstall it or choose another name"
        )
    offered = load_plugins(entry_points=False).parts[PLURALS[kind]]
    if names.cls in offered or re.search(rf"\b{names.cls}\b", part):
        raise RecipeError(f"NAME is {names.name!r}, but rlkit has {names.cls} itself; try {PREFIX}my-{names.plugin}")


def _read(template: str) -> str:
    return (HERE / f"{template}.tmpl").read_text(encoding="utf-8")
