"""What exists: built-in parts and those of installed plugins, with where each came from."""

from __future__ import annotations

import difflib
import inspect
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import pluggy

from rlkit import hooks
from rlkit.commands import VERBS
from rlkit.errors import PartError, PluginError, RlkitError, explain, show
from rlkit.installed import DISABLE_VARIABLE, DISTRIBUTION, Plugin, disabled_names, installed
from rlkit.interfaces.runtime import RunPart
from rlkit.text import part_name


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
    """A recipe that is found by its name, and the plugin whose it is."""

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
            PluginError: A plugin is; the message names it, its version and how to disable it.
        """
        for plugin in self.plugins:
            plugin.require_healthy()


@contextmanager
def calling(part: object, method: str) -> Iterator[None]:
    """Name the part in whatever a plugin's code raises.

    Raises:
        PartError: It raised something that does not explain itself; rlkit's own parts keep their traceback.
    """
    try:
        yield
    except (RlkitError, MemoryError):
        raise
    except Exception as error:
        if type(part).__module__.partition(".")[0] == "rlkit" or "OutOfMemory" in type(error).__name__:
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise PartError(
            f"{part_name(part)}: `{method}` raised {explain(error)} ({last.filename}, line {last.lineno}); "
            "--debug shows the traceback, `rlkit plugins test` checks the plugin by itself"
        ) from error


def close_parts(parts: Sequence[RunPart]) -> None:
    """Close parts in order; one that raises keeps no other open.

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
    """Refuse what a part returned, where something is wrong with it.

    Raises:
        PartError: Something is; the message names the part, its plugin and distribution.
    """
    if problem is not None:
        raise PartError(f"{part_name(part)}: `{method}` {problem}")


def load_plugins(extra: Iterable[tuple[str, object]] = (), entry_points: bool = True) -> Registry:
    """Load the built-in parts, then those of installed distributions, then `extra` (name, module) pairs.

    A plugin that cannot be loaded is listed with its error and the rest goes on; `Registry.require_healthy` refuses.

    Raises:
        PluginError: Two distributions use one plugin name, or two plugins one class name of a kind, or one recipe name.
    """
    from rlkit import builtin

    registry = Registry()
    version = metadata.version(DISTRIBUTION)
    own = Plugin("builtin", DISTRIBUTION, version, "rlkit.builtin", made_for=f"=={version}")
    _add(registry, own, builtin)
    if entry_points:
        _load_entry_points(registry)
    for name, module in extra:
        _add(registry, Plugin(name, name, "?", getattr(module, "__name__", name)), module)
    return registry


def _load_entry_points(registry: Registry) -> None:
    plugins = installed()
    registry.notes += _unknown(disabled_names(), [plugin.name for plugin in plugins])
    for plugin in plugins:
        registry.notes += _shadowed(plugin)
        if plugin.disabled or plugin.error is not None or plugin.hooks is None:
            registry.plugins.append(plugin)
            continue
        try:
            module = plugin.hooks.load()
        except (Exception, SystemExit) as error:  # whatever a plugin's import raises is reported under its name
            plugin.error = f"importing {plugin.module} raised {explain(error)}"
            registry.plugins.append(plugin)
        else:
            _add(registry, plugin, module)


def _shadowed(plugin: Plugin) -> Iterator[str]:
    """Yield a note for each of a plugin's verbs that is never run."""
    for verb in sorted(VERBS.keys() & plugin.commands.keys()):
        yield f"{plugin} has a verb {verb!r}, which is rlkit's own and never runs the plugin's; call it otherwise"


def _unknown(disabled: Iterable[str], installed: Sequence[str]) -> Iterator[str]:
    """Yield a note for each name that disables nothing."""
    for name in sorted(set(disabled) - set(installed)):
        near = difflib.get_close_matches(name, installed, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"installed: {', '.join(installed) or 'none'}"
        yield f"{DISABLE_VARIABLE} names {name!r}, which is no installed plugin; {hint}"


def _add(registry: Registry, plugin: Plugin, module: object) -> None:
    """Collect what one plugin registers; all of it or, if anything is wrong, nothing."""
    registry.plugins.append(plugin)
    manager = pluggy.PluginManager("rlkit")
    manager.add_hookspecs(hooks)
    found: list[Part] = []
    try:
        manager.register(module, plugin.name)
        manager.check_pending()
        manager.hook.rlkit_register(register=lambda cls: found.append(Part(_kind_of(cls), cls, plugin)))
        recipes = _recipes_in(manager.hook.rlkit_recipes())
    except PluginError as error:
        plugin.error = str(error)
        return
    except Exception as error:  # a plugin's own code may raise anything
        plugin.error = f"{explain(error)}{_hook_hint(str(error))}"
        return
    for part in found:
        if (other := registry.parts[part.kind].get(part.name)) is not None:
            raise _clash(other.plugin, plugin, f"{part.name} among {part.kind}")
        registry.parts[part.kind][part.name] = part
    for name, path in recipes.items():
        if (first := registry.recipes.get(name)) is not None:
            raise _clash(first.plugin, plugin, f"a recipe {name!r}")
        registry.recipes[name] = RecipeFile(path, plugin)


def _clash(first: Plugin, second: Plugin, what: str) -> PluginError:
    return PluginError(
        f"plugins {first.name!r} ({first.distribution}) and {second.name!r} ({second.distribution}) both offer {what}; "
        f"uninstall one, or set {DISABLE_VARIABLE}={second.name}"
    )


def _recipes_in(folder: object) -> dict[str, Path]:
    """Return the recipes of a plugin's folder by name; none where it has no folder.

    Raises:
        PluginError: It is no folder.
    """
    if folder is None:
        return {}
    if not isinstance(folder, str | Path) or not os.path.isdir(folder):
        raise PluginError(f"rlkit_recipes returned {show(folder)}, expected a folder of recipes; is it in the wheel?")
    return {path.stem: path for path in sorted(Path(folder).glob("*.yaml"))}


def _kind_of(cls: type) -> str:
    """Return a class's kind, by the interface that it subclasses.

    Raises:
        PluginError: It is no class, is abstract, or subclasses none or several of the interfaces.
    """
    if not isinstance(cls, type):
        raise PluginError(f"rlkit_register registers {show(cls)}, expected a class")
    kinds = hooks.kinds_of(cls)
    if len(kinds) != 1:
        bases = [hooks.KINDS[kind].interface.__name__ for kind in kinds]
        known = ", ".join(kind.interface.__name__ for kind in hooks.KINDS.values())
        problem = f"the interfaces {' and '.join(bases)}, of which" if bases else "no interface of rlkit, of which"
        raise PluginError(
            f"rlkit_register registers {cls.__name__}, which subclasses {problem} a part has one: {known}"
        )
    if inspect.isabstract(cls):
        missing = ", ".join(sorted(getattr(cls, "__abstractmethods__", ())))
        raise PluginError(
            f"rlkit_register registers {cls.__name__}, which does not implement {missing} of "
            f"{hooks.KINDS[kinds[0]].interface.__name__}"
        )
    return kinds[0]


def _hook_hint(message: str) -> str:
    """Return what to do about a function that is marked as a hook, and is none."""
    if "unknown hook" not in message:
        return ""
    return f"; hooks: {', '.join(name for name in vars(hooks) if name.startswith('rlkit_'))}"
