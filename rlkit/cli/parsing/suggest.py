"""One message for each mistake in a recipe: the value, what was expected, and the nearest valid name."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import PurePath

from rlkit.cli.parsing.schema import Choice, Items, Names, Section, describe, import_paths, options, shape
from rlkit.installed import DISABLE_VARIABLE
from rlkit.recipe import Recipe
from rlkit.registry import Registry

GONE = {
    "fabric.callbacks": "rlkit's callbacks are the recipe's own: `callbacks: [...]`; rlkit calls none of Fabric's",
    "fabric.loggers": "metrics go to `metrics.jsonl` and to what `log.loggers` names; remove it",
    "log.wandb": "loggers are a list: `log: {loggers: [{class_path: Wandb, init_args: {project: ...}}]}`",
}
"""Keys that a user of Lightning Fabric may look for, and what to do without them."""
READERS = {".jsonl": "Jsonl", ".json": "HFDataset", ".parquet": "HFDataset", ".csv": "HFDataset"}
"""The task that reads files of a kind."""
PACKAGES = {
    "CalculatorMaze": "rlkit-env-games",
    "GuessNumber": "rlkit-env-games",
    "GuessTask": "rlkit-env-games",
    "HttpEngine": "rlkit-engine-http",
    "LengthReward": "rlkit-length-reward",
    "MazeTask": "rlkit-env-games",
    "McpTool": "rlkit-tool-mcp",
    "PythonTool": "rlkit-tool-python",
    "SearchTool": "rlkit-tool-search",
}
"""The parts of rlkit's own plugins, which may not be installed."""
YAML = {None: "null", True: "true", False: "false"}


def wrong_value(key: str, value: object, hint: object, registry: Registry) -> str:
    """Return that a value is not of its option's type, or out of its range."""
    remedy = f"; {_remedy(key)}" if _remedy(key) else ""
    return f"{key} is {shown(value)}, expected {describe(hint, registry, value)}{remedy}"


def settable(key: str) -> str:
    """Return the option by which the command line sets a key: a list as a whole."""
    return re.split(r"\.\d+(?:\.|$)", key, maxsplit=1)[0]


def shown(value: object) -> str:
    """Return a given value as a message shows it: numbers bare, other texts in quotes, and not all of a long one."""
    if value is None or isinstance(value, bool):
        return YAML[value]
    text = str(value)
    if isinstance(value, str) and not re.fullmatch(
        r"[-+]?(\.?\d[\d.e+-]*|\.?inf|\.?nan)|[\[{(].*", value, re.IGNORECASE
    ):
        text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _remedy(key: str) -> str:
    """Return the advice that a section's field has for values that it does not take."""
    cls: object = Recipe
    remedy = ""
    for name in key.split("."):
        found = {f.name: f for f in fields(cls)} if is_dataclass(cls) else {}
        if name not in found:
            return ""
        remedy, cls = found[name].metadata.get("remedy", ""), options(cls)[name].hint
    return str(remedy)


def unknown_option(key: str, tree: Mapping[str, object], registry: Registry) -> str:
    """Return that there is no such option, with the nearest of those that this recipe could have."""
    for gone, remedy in GONE.items():
        if key == gone or key.startswith(f"{gone}."):
            return f"{key} is not an option of rlkit: {remedy}"
    every = known_keys(registry, tree)
    return f"unknown option {key!r}; {nearest(key, list(every), [k for k, present in every.items() if present])}"


def nearest(given: str, known: Sequence[str], present: Sequence[str] = ()) -> str:
    """Name the nearest of the known options: the same name elsewhere, or a similar one."""
    parent, _, name = given.rpartition(".")
    same = [k for k in known if k.rpartition(".")[2] == name]
    near = [k for k in same if k in present]
    near = [k for k in near if k.partition(".")[0] == given.partition(".")[0]] or near
    if not near and not parent:  # in an optional section of one that is there
        near = [k for k in same if k.partition(".")[0] in present]
    siblings = {k.rpartition(".")[2]: k for k in known if k.rpartition(".")[0] == parent}
    near = near[:3] or [siblings[n] for n in difflib.get_close_matches(name, siblings, 1, 0.5)]
    near = near or difflib.get_close_matches(given, known, 1, 0.5) or same[:1]
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    listed = list(siblings) or known
    return f"known: {', '.join(listed[:12])}" if listed else "it has none"


def known_keys(registry: Registry, tree: Mapping[str, object]) -> dict[str, bool]:
    """Return every key that the recipe may have, and whether it lies in a section that the recipe has.

    Of parts there are the options of the classes that the recipe names.
    """
    return dict(sorted(_keys(Recipe, registry, tree, "")))


def _keys(cls: type, registry: Registry, tree: object, prefix: str, present: bool = True) -> Iterator[tuple[str, bool]]:
    for name, option in options(cls).items():
        allowed = shape(option.hint, registry)
        inside, node = allowed.inside, tree.get(name) if isinstance(tree, Mapping) else None
        section = isinstance(inside, Section) and (allowed.optional or allowed.plain is not None)
        here = present and not (section and node is None)
        yield f"{prefix}{name}", here
        part = inside.find(node["class_path"]) if isinstance(inside, Choice) and isinstance(node, Mapping) else None
        if part is not None and isinstance(node, Mapping):
            yield from _keys(part.cls, registry, node["init_args"], f"{prefix}{name}.", here)
        elif isinstance(inside, Section):
            yield from _keys(inside.cls, registry, node, f"{prefix}{name}.", here)
        elif isinstance(inside, Names) and isinstance(of := shape(inside.hint, registry).inside, Section):
            for inner, its in node.items() if isinstance(node, Mapping) else ():
                yield from _keys(of.cls, registry, its, f"{prefix}{name}.{inner}.", here)


def unknown_class(key: str, name: object, inside: Choice, registry: Registry) -> str:
    """Return why a name is none of a key's classes: misspelt, of another kind, disabled, or missing; with a remedy."""
    given = f"{key} is {shown(name)}"
    listed = ", ".join(inside.parts) or "none"
    if not isinstance(name, str):
        return f"{given}, expected the name of a class: {listed}"
    bare, package = name.rpartition(".")[2], name.partition(".")[0]
    if inside.kind == "tasks" and (reader := READERS.get(PurePath(name).suffix)):
        return f"{given}, a file, expected a class: write --{key} {reader} --{key}.path {name}"
    for kind, parts in registry.parts.items():
        if kind != inside.kind and bare in parts and name in (bare, *import_paths(parts[bare].cls)):
            return f"{given}, which is one of the {kind}; known {inside.kind}: {listed}"
    if "." in name and "/" not in name:
        return f"{given}, {_not_offered(package, registry)}; known {inside.kind}: {listed}"
    if distribution := PACKAGES.get(bare):
        return f"{given}, which {_state(distribution, registry)}"
    if near := difflib.get_close_matches(bare, inside.parts, 1, 0.6):
        return f"{given}, which no plugin offers; did you mean {near[0]!r}?"
    hidden = [p.name for p in registry.plugins if p.disabled]
    also = f"; disabled by {DISABLE_VARIABLE}: {', '.join(hidden)}" if hidden else ""
    return f"{given}, which no plugin offers; known: {listed}{also}"


def _not_offered(package: str, registry: Registry) -> str:
    """Return why a class of a package cannot be named, without importing the package."""
    for plugin in registry.plugins:
        if plugin.module.partition(".")[0] == package:
            if plugin.disabled:
                return f"of the plugin {plugin.name!r}, which {DISABLE_VARIABLE} disables; unset it"
            return f"which the plugin {plugin.name!r} does not register"
    return f"but no plugin of a package {package!r} is installed, and a recipe names only what plugins register"


def _state(distribution: str, registry: Registry) -> str:
    for plugin in registry.plugins:
        if plugin.distribution == distribution and plugin.disabled:
            return f"the plugin {plugin.name!r} offers, but {DISABLE_VARIABLE} disables it; unset it"
        if plugin.distribution == distribution:
            return f"{distribution} {plugin.version} does not offer; see rlkit plugins list"
    return f"{distribution} offers, which is not installed: pip install {distribution}"


def classes_at(key: str, registry: Registry) -> Choice | Section | None:
    """Return what a key may name, or the section that it is, for its help; None if it is neither."""
    inside: object = Section(Recipe)
    for name in key.split("."):
        if not isinstance(inside, Section) or name not in options(inside.cls):
            return None
        inside = shape(options(inside.cls)[name].hint, registry).inside
        inside = shape(inside.hint, registry).inside if isinstance(inside, Names | Items) else inside
    return inside if isinstance(inside, Choice | Section) else None
