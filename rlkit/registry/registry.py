"""The registry of parts and recipes: built-in ones and those of installed plugins, each with its source."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pluggy

from rlkit import hooks
from rlkit.base.errors import PartError, PluginError, RlkitError, explain_foreign, show, with_definition
from rlkit.base.installed import DISABLE_VARIABLE, DISTRIBUTION, Plugin, disabled_names, installed
from rlkit.base.text import part_name, similar, source_of
from rlkit.base.verbs import VERBS
from rlkit.interfaces.runtime import RunPart
from rlkit.registry import checks


@dataclass
class Part:
    """A class that a recipe can name, and the plugin that offers it."""

    kind: str
    cls: type
    plugin: Plugin

    @property
    def name(self) -> str:
        return self.cls.__name__


class RecipeFile(NamedTuple):
    """A recipe that can be given by name, and the plugin that provides it."""

    path: Path
    plugin: Plugin


@dataclass
class Registry:
    """All parts by kind and class name; a value, not a global."""

    parts: dict[str, dict[str, Part]] = field(default_factory=lambda: {kind: {} for kind in hooks.KINDS})
    recipes: dict[str, RecipeFile] = field(default_factory=dict)
    plugins: list[Plugin] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Problems that do not prevent loading."""

    @property
    def packages(self) -> list[str]:
        """The top-level packages whose classes a recipe may name."""
        modules = {part.cls.__module__ for parts in self.parts.values() for part in parts.values()}
        return sorted({module.partition(".")[0] for module in modules} | {"rlkit"})

    def require_healthy(self) -> None:
        """Refuse to train while a plugin is broken.

        Raises:
            PluginError: A plugin is broken; the message names it, its version and how to disable it.
        """
        for plugin in self.plugins:
            plugin.require_healthy()


@contextmanager
def calling(part: object, method: str) -> Iterator[None]:
    """Name the part in errors that a plugin's code raises; errors of rlkit's own parts keep their traceback.

    Raises:
        PartError: The part raised an error that is not one of rlkit's.
    """
    try:
        yield
    except (RlkitError, MemoryError):
        raise
    except Exception as error:
        if not source_of(type(part).__module__) or "OutOfMemory" in type(error).__name__:
            raise
        problem = with_definition(f"{part_name(part)}: `{method}` raised {explain_foreign(error)}", part, method)
        raise PartError(
            f"{problem}; --debug shows the traceback, `rlkit plugins test` checks the plugin by itself"
        ) from error


def close_parts(parts: Sequence[RunPart]) -> None:
    """Close parts in order, all of them even if one raises.

    Raises:
        PartError: A plugin's part raised; the message names it.
    """
    with ExitStack() as stack:
        for part in reversed(parts):
            stack.callback(_close, part)


def _close(part: RunPart) -> None:
    with calling(part, "close"):
        part.close()


def require(part: object, method: str, problem: str | None) -> None:
    """Refuse what a part returned if it has a problem.

    Raises:
        PartError: There is a problem; the message names the part, its plugin and where the method is.
    """
    if problem is not None:
        raise PartError(with_definition(f"{part_name(part)}: `{method}` {problem}", part, method))


def load_plugins(extra: Iterable[tuple[str, object]] = (), entry_points: bool = True) -> Registry:
    """Load the built-in parts, then those of installed distributions, then `extra` (name, module) pairs.

    A plugin that cannot be loaded is listed with its error, and loading continues: `Registry.require_healthy` refuses
    it. The same holds for plugins that share a name, a class name of one kind, or the name of a recipe.
    """
    from rlkit.registry import builtin

    registry = Registry()
    version = metadata.version(DISTRIBUTION)
    _add(registry, Plugin("builtin", DISTRIBUTION, version, "rlkit.registry.builtin", made_for=f"=={version}"), builtin)
    if entry_points:
        _load_entry_points(registry)
    for name, module in extra:
        _add(registry, Plugin(name, name, "?", getattr(module, "__name__", name)), module)
    registry.notes += [f"{plugin}: {warning}" for plugin in registry.plugins for warning in plugin.warnings]
    return registry


def _load_entry_points(registry: Registry) -> None:
    plugins = installed()
    names = [plugin.name for plugin in plugins]
    for name in sorted(set(disabled_names()) - set(names)):
        hint = similar(name, names, "installed")
        registry.notes.append(f"{DISABLE_VARIABLE} names {name!r}, which is no installed plugin; {hint}")
    for plugin in plugins:
        registry.notes += _shadowed(plugin)
        if plugin.disabled or plugin.error is not None or plugin.hooks is None:
            registry.plugins.append(plugin)
            continue
        start = time.monotonic()
        try:
            module = plugin.hooks.load()
        except (Exception, SystemExit) as error:  # a plugin's import may raise anything
            plugin.error = f"importing {plugin.module} (entry point in pyproject.toml) raised {explain_foreign(error)}"
            registry.plugins.append(plugin)
        else:
            seconds = time.monotonic() - start
            if seconds > checks.SLOW_IMPORT:
                plugin.warnings.append(
                    f"importing {plugin.module} took {seconds:.1f} s, which delays most commands; import heavy "
                    "packages in the functions that use them"
                )
            _add(registry, plugin, module)


def _shadowed(plugin: Plugin) -> Iterator[str]:
    """Yield a note for each verb of a plugin that is never run."""
    for verb in sorted(VERBS.keys() & plugin.commands.keys()):
        yield f"{plugin} has a verb {verb!r}, which is a verb of rlkit, so the plugin's never runs; rename it"


def _add(registry: Registry, plugin: Plugin, module: object) -> None:
    """Register the parts and recipes of a plugin: all of them or, if it has an error, none."""
    registry.plugins.append(plugin)
    manager = pluggy.PluginManager("rlkit")
    manager.add_hookspecs(hooks)
    parts: list[Part] = []
    try:
        manager.register(module, plugin.name)
        manager.check_pending()
        ignored_hooks = [*checks.unmarked_hooks(module), *checks.duplicate_hooks(module)]
        if ignored_hooks:
            raise PluginError("; ".join(ignored_hooks))
        manager.hook.rlkit_register(register=lambda cls: parts.append(Part(_kind_of(cls), cls, plugin)))
        recipes = _recipes_in(manager.hook.rlkit_recipes(), module)
    except PluginError as error:
        plugin.error = str(error)
        return
    except pluggy.PluginValidationError as error:
        plugin.error = _hook_problem(str(error), module)
        return
    except Exception as error:  # a plugin's own code may raise anything
        plugin.error = explain_foreign(error)
        return
    if not manager.get_hookcallers(module) and not plugin.commands:
        plugin.warnings.append(f"{plugin.module or module} has no hook, so it provides nothing; see rlkit docs plugins")
    plugin.warnings += [text for part in parts for text in checks.misspelt_methods(part.cls)]
    if not _clashes(registry, plugin, parts, recipes):
        for part in parts:
            registry.parts[part.kind][part.name] = part
        registry.recipes |= {name: RecipeFile(path, plugin) for name, path in recipes.items()}


def _clashes(registry: Registry, plugin: Plugin, parts: Sequence[Part], recipes: Iterable[str]) -> bool:
    """Whether a plugin provides a name twice, or one that is taken; then neither plugin is registered."""
    taken = [part for of_kind in registry.parts.values() for part in of_kind.values()]
    clashes: list[tuple[Plugin, str, object]] = [
        (other.plugin, f"{part.name} among {part.kind}", part.cls)
        for index, part in enumerate(parts)
        for other in (*taken, *parts[:index])
        if (other.kind, other.name) == (part.kind, part.name)
    ]
    clashes += [
        (registry.recipes[name].plugin, f"a recipe {name!r}", 0) for name in recipes if name in registry.recipes
    ]
    for owner, name, cls in clashes:
        owners = f"plugins {owner.name!r} ({owner.distribution}) and {plugin.name!r} ({plugin.distribution}) both offer"
        problem = with_definition(f"{owners} {name}; rename it, or disable one of them", cls)
        plugin.error = plugin.error or problem
        if owner.distribution != DISTRIBUTION:
            owner.error = owner.error or problem
            for kind, of_kind in registry.parts.items():
                registry.parts[kind] = {n: part for n, part in of_kind.items() if part.plugin is not owner}
            registry.recipes = {n: recipe for n, recipe in registry.recipes.items() if recipe.plugin is not owner}
    return bool(clashes)


def _recipes_in(folder: object, module: object) -> dict[str, Path]:
    """Return the recipes in a plugin's folder by name; none if it has no folder.

    Raises:
        PluginError: The path is no folder.
    """
    if folder is None:
        return {}
    if not isinstance(folder, str | Path) or not os.path.isdir(folder):
        problem = f"rlkit_recipes returned {show(folder)}, expected a folder of recipes; is it in the wheel?"
        raise PluginError(with_definition(problem, module, "rlkit_recipes"))
    return {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))}


def _kind_of(cls: type) -> str:
    """Return a class's kind, by the interface that it subclasses.

    Raises:
        PluginError: It is no class, is abstract, or does not subclass exactly one interface.
    """
    if not isinstance(cls, type):
        raise PluginError(with_definition(f"rlkit_register registers {show(cls)}, expected a class", cls))
    registered = f"rlkit_register registers {cls.__name__}"
    kinds = hooks.kinds_of(cls)
    if len(kinds) != 1:
        bases = [hooks.KINDS[kind].interface.__name__ for kind in kinds]
        interfaces = ", ".join(kind.interface.__name__ for kind in hooks.KINDS.values())
        subclassed = f"the interfaces {' and '.join(bases)}" if bases else "no interface of rlkit"
        problem = f"{registered}, which subclasses {subclassed}, expected exactly one of: {interfaces}"
        raise PluginError(with_definition(problem, cls))
    if inspect.isabstract(cls):
        names = sorted(getattr(cls, "__abstractmethods__", ()))
        missing = ", ".join(getattr(getattr(cls, name), "__qualname__", name) for name in names)
        raise PluginError(with_definition(f"{registered}, which does not implement {missing}", cls))
    problems = checks.method_problems(cls)
    if problems:
        raise PluginError(f"{registered}: {'; '.join(problems)}")
    return kinds[0]


def _hook_problem(message: str, module: object) -> str:
    """Return pluggy's error in one line, with the signatures that are expected."""
    lines = " ".join(line.strip() for line in message.splitlines() if line.strip())
    parameters = {name: inspect.signature(getattr(hooks, name)).parameters for name in checks.HOOKS}
    signatures = ", ".join(f"{name}({', '.join(arguments)})" for name, arguments in parameters.items())
    hook = next((name for name in checks.HOOKS if f"{name!r}" in message), "")
    return with_definition(f"{lines}; hooks: {signatures}", module, hook)
