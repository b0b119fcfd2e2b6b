"""Recipe files and texts of the command line as plain data, converted to the types of options.

It is YAML in which surprises are refused. jsonargparse converts plain values, since it reads the texts in them as YAML
and makes tuples of lists and members of enums of their names, which pydantic does not; it leaves ranges to pydantic.
"""

from __future__ import annotations

import functools
import os
from codecs import BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Mapping
from difflib import get_close_matches
from glob import glob
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_loader

from rlkit.base.errors import RecipeError, shorten
from rlkit.recipe.credentials import key_of
from rlkit.recipe.schema import union_members
from rlkit.recipe.yaml_text import MAX_BYTES, load
from rlkit.registry import RecipeFile


def find_recipe(recipe: str, named: Mapping[str, RecipeFile]) -> Path:
    """Return the path of a recipe: a file, or the name of a recipe that rlkit or a plugin ships.

    Raises:
        RecipeError: It is neither.
    """
    if os.path.isfile(recipe):  # False, too, for a text that cannot be a path
        return Path(recipe)
    shipped = named.get(recipe.removesuffix(".yaml"))
    if shipped is not None:
        return shipped.path
    begun = [name for name in named if name.startswith(recipe)] if recipe else []
    begun.sort(key=lambda name: (name[len(recipe) :].startswith("_"), name))
    folder, file = os.path.split(recipe)
    files = glob("*.y*ml", root_dir=folder) if os.path.isdir(folder or os.curdir) else []
    paths = {os.path.splitext(name)[0]: os.path.join(folder, name) for name in files}
    near = begun or get_close_matches(os.path.splitext(file)[0], dict.fromkeys(named) | paths, 1)
    hint = f"did you mean {paths.get(near[0], near[0])!r}?" if near else "rlkit recipe list names them"
    raise RecipeError(f"--recipe is {shorten(recipe, 200)!r}, neither a file nor a known recipe; {hint}")


def read_recipe(path: Path) -> dict[str, object]:
    """Read a recipe file.

    Raises:
        RecipeError: The file cannot be read, or does not hold sections.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise RecipeError(f"{path} has {path.stat().st_size:,} bytes, expected a recipe of at most {MAX_BYTES:,}")
        content = load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        problem = "UTF-16, expected UTF-8" if error.object[:2] in (BOM_UTF16_LE, BOM_UTF16_BE) else "not UTF-8"
        raise RecipeError(f"{path}:{line} is {problem}; save it as UTF-8") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not YAML: {error}") from error
    if not isinstance(content, dict):
        kind = "nothing" if content is None else type(content).__name__
        raise RecipeError(f"{path} holds {kind}, expected sections such as `model: {{path: tiny}}`")
    return content


def locations(path: Path) -> dict[str, str]:
    """Return the place of each option in a recipe file, as `path:line`, by its dotted key."""
    by_key: dict[str, str] = {}
    nodes: list[tuple[str, object]] = [("", yaml.compose(path.read_text(encoding="utf-8"), yaml.SafeLoader))]
    for key, node in nodes:
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        children = [(key_of(key, name.value), name, child) for name, child in pairs]
        if isinstance(node, yaml.SequenceNode):
            children = [(key_of(key, index), child, child) for index, child in enumerate(node.value)]
        for child_key, start, child in children:
            by_key.setdefault(child_key, f"{path}:{start.start_mark.line + 1}")
            nodes.append((child_key, child))
    return by_key


def parse_text(value: object) -> object:
    """Return the plain data that a text represents; a text that is no YAML, or any other value, as it is."""
    try:
        return load(value) if isinstance(value, str) else value
    except ValueError:
        return value


def structured(value: object) -> object:
    """Return the list, mapping or null that a text represents; any other value is returned as it is."""
    loaded = parse_text(value)
    return loaded if isinstance(loaded, dict | list) or loaded is None else value


def convert(value: object, hint: object) -> object:
    """Return a plain value, or the one that a text represents, as a value of a type.

    Raises:
        ValueError: The value is not of the type, or out of its range.
    """
    loaded = parse_text(value)
    members = union_members(hint)
    words = [word for member in members if get_origin(member) is Literal for word in get_args(member)]
    if isinstance(loaded, bool) and not {bool, str, Any} & set(members) and loaded not in words:
        raise ValueError(f"{loaded} is not of the type {hint}")  # which Python would take for 0 or 1
    try:
        return _parser(hint).parse_object({"value": value}, env=False).value
    except (ArgumentError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


@functools.cache
def _parser(hint: object) -> ArgumentParser:
    set_loader("rlkit", load, (ValueError,))
    parser = ArgumentParser(exit_on_error=False, default_env=False, parser_mode="rlkit")
    parser.add_argument("--value", type=hint)
    return parser
