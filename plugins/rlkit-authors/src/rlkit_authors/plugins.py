"""`rlkit plugins list|show|new|test`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlkit.base.errors import RecipeError, RlkitError
from rlkit.base.installed import Plugin
from rlkit.base.terminal import echo, show
from rlkit.base.text import similar
from rlkit.commands import parse
from rlkit.hooks import KINDS
from rlkit.registry import Part, Registry, load_plugins
from rlkit_authors import reference
from rlkit_authors.conformance import Finding, examine
from rlkit_authors.installed import offers, show_plugins
from rlkit_authors.scaffold import WRITTEN

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent / "examples").glob("[!_]*.py"))}
"""A worked example for each way to extend rlkit."""

USAGE = f"""usage: rlkit plugins list          installed plugins, the rlkit that they are made for, what they offer
       rlkit plugins show NAME     a part's options, a plugin's parts, a kind of part, or a type that plugins use:
                                   Batch, Trajectory, Prompt, PolicyOutput, LossOutput, Runtime, RewardFunction ...
       rlkit plugins show SEAM     a worked example of a plugin; SEAM is one of {", ".join(EXAMPLES)}
       rlkit plugins new NAME --kind KIND [--out DIR]
                                   write a package that works, with its tests and its README; KIND is one of
                                   {", ".join(WRITTEN)}
       rlkit plugins test NAME     check an installed plugin: its parts against their interfaces, verbs and recipes
"""


def run(argv: Sequence[str]) -> int:
    """List, show, make or test; return the exit status: 2 where a listed plugin is broken, 1 where a check failed."""
    verb, arguments = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb == "new":
        return _new(arguments)
    if verb in ("", "-h", "--help") or {"-h", "--help"} & set(arguments):
        print(USAGE, end="")
        return 0 if verb else 2
    if verb not in ("list", "show", "test") or len(arguments) != (verb != "list"):
        expected = "`list`, `show NAME`, `new NAME --kind KIND` or `test NAME`"
        raise RecipeError(f"the arguments of rlkit plugins are {' '.join(argv)!r}, expected {expected}")
    registry = load_plugins()
    if verb == "show":
        echo(_show(arguments[0], registry))
        return 0
    if verb == "test":
        return _test(arguments[0], registry)
    show_plugins(registry)
    for note in registry.notes:
        echo(f"note: {note}")
    return 2 if any(plugin.error for plugin in registry.plugins) else 0


def _new(argv: Sequence[str]) -> int:
    from rlkit_authors.scaffold import new

    folder = new(argv)
    echo(f"{folder} is a plugin: pip install -e '{folder}[test]', then pytest {folder}")
    return 0


def _test(name: str, registry: Registry) -> int:
    findings = []
    for plugin in _find_plugins(name, registry):
        findings += [*examine(plugin, registry, _begin), *_check_recipes(plugin, registry)]
    show(("of", "check", "result", "why"), [(f.part, f.check, f.state, f.why) for f in findings])
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def _begin(part: str) -> None:
    echo(f"checking {part}", error=True)


def _check_recipes(plugin: Plugin, registry: Registry) -> Iterator[Finding]:
    """Read and build each recipe of a plugin, as a run would."""
    for name, (_, owner) in registry.recipes.items():
        if owner is plugin:
            try:
                parse("recipe check", [name])
            except RlkitError as error:
                yield Finding(name, "recipe", "failed", str(error))
            else:
                yield Finding(name, "recipe", "ok")


def _find_plugins(name: str, registry: Registry) -> list[Plugin]:
    """Return the plugin of a name, or those of a distribution."""
    plugins = [p for p in registry.plugins if _plain(name) in (_plain(p.name), _plain(p.distribution))]
    if not plugins:
        names = [plugin.name for plugin in registry.plugins]
        raise RecipeError(f"no plugin or distribution is named {name!r}; {similar(name, names, 'installed')}")
    return plugins


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _show(name: str, registry: Registry) -> str:
    if name in EXAMPLES:
        return EXAMPLES[name].read_text(encoding="utf-8").rstrip()
    types, aliases = reference.public_classes(), reference.aliases()
    parts = [part for parts in registry.parts.values() for part in parts.values()]
    descriptions = [_describe(part) for part in parts if name in (part.name, part.plugin.name)]
    descriptions += [_describe_kind(kind, registry) for kind, (single, _, _) in KINDS.items() if name in (kind, single)]
    descriptions += [_describe_rest(plugin, registry) for plugin in registry.plugins if plugin.name == name]
    descriptions += [reference.describe(types[name])] if name in types else []
    descriptions += [aliases[name]] if name in aliases else []
    if not descriptions:
        plugins = [plugin.name for plugin in registry.plugins]
        names = [*(part.name for part in parts), *plugins, *types, *aliases, *KINDS, *EXAMPLES]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see rlkit plugins list"
        raise RecipeError(f"no part, plugin, kind or type is named {name!r}; {hint}")
    return "\n\n".join(filter(None, descriptions))


def _describe_kind(kind: str, registry: Registry) -> str:
    """Return a kind's interface, the recipe's key that names parts of it, and those that there are."""
    names = ", ".join(registry.parts[kind]) or "none"
    return f"{kind}: `{KINDS[kind].key}:` in a recipe; {names}\n\n{reference.describe(KINDS[kind].interface)}"


def _describe_rest(plugin: Plugin, registry: Registry) -> str:
    """Return a plugin's verbs and recipes."""
    return "\n".join(line for line in offers(plugin, registry).splitlines() if line.startswith(("commands", "recipes")))


def _describe(part: Part) -> str:
    signature = inspect.signature(part.cls)
    plugin = part.plugin
    head = f"{part.name}{signature}  ({part.kind}, from {plugin.distribution} {plugin.version})"
    return f"{head}\n\n{inspect.cleandoc(part.cls.__doc__ or '(not documented)')}"
