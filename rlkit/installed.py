"""Installed plugins, as the metadata of their distributions describes them; nothing of theirs is imported."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib import metadata

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from rlkit.errors import PluginError

DISABLE_VARIABLE = "RLKIT_DISABLE_PLUGINS"
DISTRIBUTION = "rlkit-fabric"
"""What rlkit is called where packages are installed; the name `rlkit` there is another project's."""

PARTS, COMMANDS = "rlkit", "rlkit.commands"
"""The groups of entry points: modules with hooks, and functions that are verbs of the command line."""


@dataclass
class Plugin:
    """A plugin and how loading it went: `error` is None if it works."""

    name: str
    distribution: str
    version: str
    module: str = ""
    made_for: str = ""
    """The versions of rlkit that its distribution requires, such as `>=0.1,<0.2`; empty for any."""
    error: str | None = None
    warnings: list[str] = field(default_factory=list)
    """What looks wrong and does not prevent loading."""
    disabled: bool = False
    hooks: metadata.EntryPoint | None = None
    """What loads its module; None if it has no hooks."""
    commands: dict[str, metadata.EntryPoint] = field(default_factory=dict)
    """What loads its verbs of the command line, by name."""

    def __str__(self) -> str:
        return f"plugin {self.name!r} of {self.distribution} {self.version}"

    def require_healthy(self) -> None:
        """Refuse a plugin that cannot be used.

        Raises:
            PluginError: It is broken, or made for another rlkit; the message has the remedy.
        """
        if self.error is not None:
            raise PluginError(
                f"{self} cannot be loaded: {self.error}. Fix or uninstall it, or set {DISABLE_VARIABLE}={self.name}"
            )


def disabled_names() -> set[str]:
    """Return the names of plugins that the environment disables."""
    return {name.strip() for name in os.environ.get(DISABLE_VARIABLE, "").split(",")} - {""}


def installed() -> list[Plugin]:
    """Return the plugins of all distributions, by name; those for another rlkit have an `error` with both versions.

    A distribution with verbs alone is a plugin that is called what the distribution is. Plugins of two distributions
    that use one name have an `error` each.
    """
    found: list[Plugin] = []
    for entry in sorted(metadata.entry_points(group=PARTS), key=lambda e: e.name):
        plugin = _describe(entry, entry.name)
        plugin.hooks = entry
        same = [p for p in found if p.name == plugin.name and not p.disabled]
        clash = bool(same) and same[0].distribution != plugin.distribution
        if clash:
            plugin.error = same[0].error = (
                f"plugin name {entry.name!r} is used by two distributions, {same[0].distribution} and "
                f"{plugin.distribution}; uninstall one, or disable both"
            )
        if clash or not same:
            found.append(plugin)
    for entry in sorted(metadata.entry_points(group=COMMANDS), key=lambda e: e.name):
        plugin = _describe(entry, entry.dist.name if entry.dist else entry.name)
        owner = next((p for p in found if p.distribution == plugin.distribution), plugin)
        owner.commands[entry.name] = entry
        if owner is plugin:
            found.append(plugin)
    return found


def _describe(entry: metadata.EntryPoint, name: str) -> Plugin:
    dist = entry.dist
    plugin = Plugin(name, dist.name if dist else "?", dist.version if dist else "?", entry.value)
    plugin.disabled = name in disabled_names()
    here = metadata.version(DISTRIBUTION)
    for needed in _requirements((dist.requires if dist else None) or []):
        if canonicalize_name(needed.name) != DISTRIBUTION:
            plugin.warnings.append(
                f"its distribution requires `{needed}`, which is another project; require `{DISTRIBUTION}` in its "
                "pyproject.toml"
            )
            continue
        plugin.made_for = str(needed.specifier)
        if not (plugin.disabled or needed.specifier.contains(here, prereleases=True)):
            plugin.error = (
                f"it needs {DISTRIBUTION}{needed.specifier}, but {here} is installed; install versions that fit: "
                f"pip install --upgrade {plugin.distribution} {DISTRIBUTION}"
            )
    return plugin


def _requirements(texts: Iterable[str]) -> Iterable[Requirement]:
    """Yield what a distribution requires of rlkit, on this machine and without extras."""
    for text in texts:
        try:
            needed = Requirement(text)
        except InvalidRequirement:  # of another package's making; pip has installed it all the same
            continue
        here = needed.marker is None or needed.marker.evaluate({"extra": ""})
        if here and canonicalize_name(needed.name) in (DISTRIBUTION, "rlkit"):
            yield needed
