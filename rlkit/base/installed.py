"""Installed plugins, read from the metadata of their distributions; nothing is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlkit.base.errors import PluginError

DISABLE_VARIABLE = "RLKIT_DISABLE_PLUGINS"
DISTRIBUTION = "rlkit-fabric"
"""The name of rlkit's distribution; `rlkit` on PyPI is another project."""

PARTS, COMMANDS = "rlkit", "rlkit.commands"
"""The groups of entry points: modules with hooks, and functions that are verbs of the command line."""


@dataclass
class Plugin:
    """A plugin, and the outcome of loading it: `error` is None if it works."""

    name: str
    distribution: str
    version: str
    module: str = ""
    made_for: str = ""
    """The versions of rlkit that its distribution requires, such as `>=0.1,<0.3`; empty for any."""
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    """Problems that do not prevent loading."""
    disabled: bool = False
    hooks: metadata.EntryPoint | None = None
    """The entry point of its module; None if it has no hooks."""
    commands: dict[str, metadata.EntryPoint] = field(default_factory=dict)
    """The entry points of its verbs of the command line, by name."""

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"

    def require_healthy(self) -> None:
        """Refuse a plugin that cannot be used.

        Raises:
            PluginError: It is broken, or made for another version of rlkit; the message has the remedy.
        """
        if self.error is not None:
            raise PluginError(
                f"{self} cannot be loaded: {self.error}. Fix or uninstall it, or set {DISABLE_VARIABLE}={self.name}"
            )


def extra_command(extra: str) -> str:
    """Return the command that installs what an extra of rlkit needs, for messages."""
    return f"pip install -e '.[{extra}]' in a checkout of rlkit"


def plugin_command(distribution: str) -> str:
    """Return the command that installs one of rlkit's own plugins, for messages."""
    return f"pip install ./plugins/{distribution} in a checkout of rlkit"


def disabled_names() -> set[str]:
    """Return the names of plugins that the environment disables."""
    return {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",")} - {""}


def installed() -> list[Plugin]:
    """Return the plugins of all distributions, by name; those for another version of rlkit have an `error`.

    A distribution that has only verbs is a plugin with the distribution's name. Plugins of two distributions that share
    a name have an `error` each.
    """
    plugins: list[Plugin] = []
    for entry in sorted(entry_points(PARTS), key=lambda e: e.name):
        if comes_with_rlkit(entry):
            continue  # its parts are built-in ones
        plugin = _describe(entry, entry.name)
        plugin.hooks = entry
        namesakes = [p for p in plugins if p.name == plugin.name and not p.disabled]
        clash = bool(namesakes) and namesakes[0].distribution != plugin.distribution
        if clash:
            plugin.error = namesakes[0].error = (
                f"plugin name {entry.name!r} is used by two distributions, {namesakes[0].distribution} and "
                f"{plugin.distribution}; uninstall one, or disable both"
            )
        if clash or not namesakes:
            plugins.append(plugin)
    for entry in sorted(entry_points(COMMANDS), key=lambda e: e.name):
        if comes_with_rlkit(entry):
            continue
        plugin = _describe(entry, entry.dist.name if entry.dist else entry.name)
        owner = next((p for p in plugins if p.distribution == plugin.distribution), plugin)
        owner.commands[entry.name] = entry
        if owner is plugin:
            plugins.append(plugin)
    return plugins


def comes_with_rlkit(entry: metadata.EntryPoint) -> bool:
    """Whether an entry point is one of rlkit's own distribution: it names a package that is in the same wheel."""
    return entry.dist is not None and entry.dist.name == DISTRIBUTION


def entry_points(group: str) -> metadata.EntryPoints:
    """Return the entry points of a group; reading the metadata of all distributions takes 20 ms, so it is kept."""
    return _entry_points(group, tuple((folder, _installed_at(folder)) for folder in sys.path))


@lru_cache(maxsize=2)
def _entry_points(group: str, folders: tuple[tuple[str, int], ...]) -> metadata.EntryPoints:  # noqa: ARG001 - a key
    return metadata.entry_points(group=group)


def _installed_at(folder: str) -> int:
    """Return the time in ns at which a folder's distributions last changed; 0 for folders without any."""
    try:
        has_distributions = any(name.endswith((".dist-info", ".egg-info")) for name in os.listdir(folder or "."))
        return os.stat(folder or ".").st_mtime_ns if has_distributions else 0
    except OSError:  # an archive, or none
        return 0


def _describe(entry: metadata.EntryPoint, name: str) -> Plugin:
    dist = entry.dist
    plugin = Plugin(name, dist.name if dist else "?", dist.version if dist else "?", entry.value)
    plugin.disabled = name in disabled_names()
    version = metadata.version(DISTRIBUTION)
    for requirement in _requirements((dist.requires if dist else None) or []):
        if canonicalize_name(requirement.name) != DISTRIBUTION:
            plugin.warnings.append(
                f"its distribution requires `{requirement}`, which is another project; require `{DISTRIBUTION}` in its "
                "pyproject.toml"
            )
            continue
        plugin.made_for = str(requirement.specifier)
        if not (plugin.disabled or requirement.specifier.contains(version, prereleases=True)):
            plugin.error = (
                f"it needs {DISTRIBUTION}{requirement.specifier}, but {version} is installed; install versions "
                f"of {plugin.distribution} and {DISTRIBUTION} that fit"
            )
    return plugin


def _requirements(texts: Iterable[str]) -> Iterable[Requirement]:
    """Yield the requirements of rlkit on this machine, without extras."""
    for text in texts:
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # pip has installed it all the same
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and canonicalize_name(requirement.name) in (DISTRIBUTION, "rlkit"):
            yield requirement
