"""`rlkit plugins list|show`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rlkit.errors import RecipeError
from rlkit.registry import Part, Registry, load_plugins

USAGE = """usage: rlkit plugins list          installed plugins and the parts that they offer
       rlkit plugins show NAME     a part's options, or a plugin's parts
"""


def run(argv: Sequence[str]) -> int:
    """List or show; give the exit status: 2 where a plugin is broken."""
    verb, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb in ("", "-h", "--help"):
        print(USAGE, end="")
        return 0 if verb else 2
    registry = load_plugins()
    if verb == "list" and not rest:
        Console(soft_wrap=True).print(plugin_table(registry))
        return 2 if any(plugin.error for plugin in registry.plugins) else 0
    if verb == "show" and len(rest) == 1:
        print(_show(rest[0], registry))
        return 0
    raise RecipeError(f"rlkit plugins was given {' '.join(argv)!r}, expected `list` or `show NAME`")


def plugin_table(registry: Registry) -> Table:
    """Make the table of plugins, broken and disabled ones included."""
    table = Table("plugin", "distribution", "version", "offers")
    for plugin in registry.plugins:
        offers = [part.name for role in registry.parts.values() for part in role.values() if part.plugin is plugin]
        state = "disabled" if plugin.disabled else f"BROKEN: {plugin.error}" if plugin.error else ", ".join(offers)
        table.add_row(plugin.name, plugin.distribution, plugin.version, state)
    return table


def _show(name: str, registry: Registry) -> str:
    parts = [part for role in registry.parts.values() for part in role.values()]
    found = [part for part in parts if name in (part.name, part.plugin.name)]
    if not found:
        near = difflib.get_close_matches(name, [p.name for p in parts] + [p.name for p in registry.plugins], 1)
        hint = f"did you mean {near[0]!r}?" if near else "see rlkit plugins list"
        raise RecipeError(f"no part or plugin is named {name!r}; {hint}")
    return "\n\n".join(map(_describe, found))


def _describe(part: Part) -> str:
    signature = inspect.signature(part.cls)
    plugin = part.plugin
    head = f"{part.name}{signature}  ({part.role}, from {plugin.distribution} {plugin.version})"
    return f"{head}\n\n{inspect.cleandoc(part.cls.__doc__ or '(not documented)')}"
