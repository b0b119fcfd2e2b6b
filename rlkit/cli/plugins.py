"""`rlkit plugins list|show|new|test`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Sequence

from rlkit.cli.display import say, show
from rlkit.errors import RecipeError
from rlkit.registry import Part, Plugin, Registry, load_plugins

USAGE = """usage: rlkit plugins list          installed plugins and the parts that they offer
       rlkit plugins show NAME     a part's options, a plugin's parts, or what plugins are written against:
                                   Batch, Trajectory, Prompt, PolicyOutput, LossOutput, Runtime, RewardFunction …
       rlkit plugins new NAME --kind KIND [--out DIR]
                                   write a package with a working part, its tests and its README;
                                   KIND is one of tool, reward, advantage, engine, loss, task, interaction, environment,
                                   filter, parser, optimizer, schedule
       rlkit plugins test NAME     check an installed plugin's parts against what their interfaces ask for
"""


def run(argv: Sequence[str]) -> int:
    """List, show, make or test; give the exit status: 2 where a listed plugin is broken, 1 where a check failed."""
    verb, rest = (argv[0], list(argv[1:])) if argv else ("", [])
    if verb == "new":
        return _new(rest)
    if verb in ("", "-h", "--help") or {"-h", "--help"} & set(rest):
        print(USAGE, end="")
        return 0 if verb else 2
    if verb not in ("list", "show", "test") or len(rest) != (verb != "list"):
        expected = "`list`, `show NAME`, `new NAME --kind KIND` or `test NAME`"
        raise RecipeError(f"rlkit plugins was given {' '.join(argv)!r}, expected {expected}")
    registry = load_plugins()
    if verb == "show":
        say(_show(rest[0], registry))
        return 0
    if verb == "test":
        return _test(rest[0], registry)
    show_plugins(registry)
    for note in registry.notes:
        say(f"note: {note}")
    return 2 if any(plugin.error for plugin in registry.plugins) else 0


def _new(argv: Sequence[str]) -> int:
    from rlkit.cli.scaffold import new

    folder = new(argv)
    say(f"{folder} is a plugin: pip install -e '{folder}[test]', then pytest {folder}")
    return 0


def _test(name: str, registry: Registry) -> int:
    from rlkit.testing.conformance import examine

    findings = [f for plugin in _find_plugins(name, registry) for f in examine(plugin, registry)]
    show(("part", "check", "result", "why"), [(f.part, f.check, f.state, f.why) for f in findings])
    return 1 if any(finding.state == "failed" for finding in findings) else 0


def _find_plugins(name: str, registry: Registry) -> list[Plugin]:
    """Return the plugin of a name, or those of a distribution."""
    found = [p for p in registry.plugins if _plain(name) in (_plain(p.name), _plain(p.distribution))]
    if not found:
        known = [plugin.name for plugin in registry.plugins]
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(known)}"
        raise RecipeError(f"no plugin or distribution is named {name!r}; {hint}")
    return found


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def show_plugins(registry: Registry) -> None:
    """Print the table of plugins, broken and disabled ones included."""
    rows = []
    for plugin in registry.plugins:
        state = (
            "disabled" if plugin.disabled else f"BROKEN: {plugin.error}" if plugin.error else _offers(plugin, registry)
        )
        rows.append((plugin.name, plugin.distribution, plugin.version, state))
    show(("plugin", "distribution", "version", "offers"), rows)


def _offers(plugin: Plugin, registry: Registry) -> str:
    """Return a line for each kind of which a plugin offers parts."""
    offers = {kind: [p.name for p in parts.values() if p.plugin is plugin] for kind, parts in registry.parts.items()}
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in offers.items() if names) or "nothing"


def _show(name: str, registry: Registry) -> str:
    from rlkit.cli import reference

    types = reference.known()
    parts = [part for parts in registry.parts.values() for part in parts.values()]
    shown = [_describe(part) for part in parts if name in (part.name, part.plugin.name)]
    shown += [reference.describe(types[name])] if name in types else []
    if not shown:
        names = [*(part.name for part in parts), *(plugin.name for plugin in registry.plugins), *types]
        near = difflib.get_close_matches(name, names, 1)
        hint = f"did you mean {near[0]!r}?" if near else "see rlkit plugins list"
        raise RecipeError(f"no part, plugin or type is named {name!r}; {hint}")
    return "\n\n".join(shown)


def _describe(part: Part) -> str:
    signature = inspect.signature(part.cls)
    plugin = part.plugin
    head = f"{part.name}{signature}  ({part.kind}, from {plugin.distribution} {plugin.version})"
    return f"{head}\n\n{inspect.cleandoc(part.cls.__doc__ or '(not documented)')}"
