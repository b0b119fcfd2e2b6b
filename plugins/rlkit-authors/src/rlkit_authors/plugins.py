"""`rlkit plugins list|show|new|test`."""

from __future__ import annotations

import difflib
import inspect
import io
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout, suppress
from pathlib import Path
from textwrap import fill

from rlkit.base.errors import RecipeError, RlkitError
from rlkit.base.installed import Plugin
from rlkit.base.terminal import echo, show
from rlkit.base.text import similar
from rlkit.commands import parse, print_help  # type: ignore[attr-defined]
from rlkit.hooks import KINDS
from rlkit.registry import Part, Registry, load_plugins
from rlkit_authors import reference
from rlkit_authors.conformance import Finding, examine
from rlkit_authors.installed import offers, show_plugins
from rlkit_authors.scaffold import WRITTEN

EXAMPLES = {path.stem: path for path in sorted((Path(__file__).parent / "examples").glob("[!_]*.py"))}
"""A worked example for each way to extend rlkit."""


def _listed(names: Iterable[str]) -> str:
    indent = " " * 35
    return fill(", ".join(names), 110, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


USAGE = f"""usage: rlkit plugins list          installed plugins, the rlkit that they are made for, what they offer
       rlkit plugins show NAME     a part's options, a plugin's parts, a kind of part, or a type that plugins use:
                                   Batch, Trajectory, Prompt, PolicyOutput, LossOutput, Runtime, RewardFunction ...
       rlkit plugins show EXAMPLE  a complete plugin of at most 40 lines, to copy from; EXAMPLE is one of
{_listed(EXAMPLES)}
       rlkit plugins new NAME --kind KIND [--out DIR]
                                   write a package that works, with its tests and its README; KIND is one of
{_listed(WRITTEN)}
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
        echo(describe(arguments[0], registry))
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
    plugins = [plugin for plugin in registry.plugins if _is_named(plugin, name)]
    if not plugins:
        names = [plugin.name for plugin in registry.plugins]
        raise RecipeError(f"no plugin or distribution is named {name!r}; {similar(name, names, 'installed')}")
    return plugins


def _is_named(plugin: Plugin, name: str) -> bool:
    """Whether a name is that of a plugin or of its distribution."""
    return _plain(name) in (_plain(plugin.name), _plain(plugin.distribution))


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def describe(name: str, registry: Registry) -> str:
    """Return the documentation of a name: that of an example, a part, a plugin, a distribution, a kind or a type.

    Raises:
        RecipeError: There is none of this name.
    """
    if name in EXAMPLES:
        return EXAMPLES[name].read_text(encoding="utf-8").rstrip()
    types, aliases = reference.public_classes(), reference.aliases()
    parts = [part for parts in registry.parts.values() for part in parts.values()]
    plugins = [plugin for plugin in registry.plugins if _is_named(plugin, name)]
    descriptions = [_describe(part, registry) for part in parts if name == part.name or part.plugin in plugins]
    descriptions += [_describe_kind(kind, registry) for kind, (single, _, _) in KINDS.items() if name in (kind, single)]
    descriptions += [_describe_rest(plugin, registry) for plugin in plugins]
    descriptions += [reference.describe(types[name])] if name in types else []
    descriptions += [aliases[name]] if name in aliases else []
    if not descriptions:
        owners = {word for plugin in registry.plugins for word in (plugin.name, plugin.distribution)}
        names = [*(part.name for part in parts), *sorted(owners), *types, *aliases, *KINDS, *EXAMPLES]
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


def _describe(part: Part, registry: Registry) -> str:
    """Return a part's documentation, with its options as `--help` prints them."""
    text = inspect.cleandoc(part.cls.__doc__ or "(not documented)").partition("Args:\n")[0].rstrip()
    head = f"{part.name}  ({part.kind}, from {part.plugin.distribution} {part.plugin.version})"
    help_text = io.StringIO()
    with redirect_stdout(help_text), suppress(SystemExit):
        print_help("plugins show", KINDS[part.kind].key, part.name, (), registry)
    _, begin, options = help_text.getvalue().rstrip().partition("\n\noptions:\n")
    return f"{head}\nsource: {inspect.getfile(part.cls)}\n\n{text}{begin}{options}"
