"""Installed plugins, with what they offer."""

from __future__ import annotations

import shutil
import textwrap

from rlkit.base.installed import Plugin
from rlkit.base.terminal import echo
from rlkit.base.verbs import VERBS
from rlkit.registry import Registry


def show_plugins(registry: Registry) -> None:
    """Print each plugin with what it offers, broken and disabled ones included, in the terminal's width."""
    width = shutil.get_terminal_size().columns
    for plugin in registry.plugins:
        echo(f"{plugin.name}  ({plugin.distribution} {plugin.version}, made for rlkit {plugin.made_for or 'any'})")
        state = (
            "disabled" if plugin.disabled else f"BROKEN: {plugin.error}" if plugin.error else offers(plugin, registry)
        )
        for line in state.splitlines():
            echo(textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))


def offers(plugin: Plugin, registry: Registry) -> str:
    """Return a line for each kind of which a plugin offers parts, then one for its verbs and one for its recipes."""
    offers = {kind: [p.name for p in parts.values() if p.plugin is plugin] for kind, parts in registry.parts.items()}
    offers["commands"] = [f"rlkit {verb}" for verb in plugin.commands if verb not in VERBS]
    offers["recipes"] = [name for name, (_, owner) in registry.recipes.items() if owner is plugin]
    return "\n".join(f"{kind}: {', '.join(names)}" for kind, names in offers.items() if names) or "nothing"
