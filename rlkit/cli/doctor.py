"""`rlkit doctor`: look at this machine and installation."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib import metadata

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rlkit.cli.plugins import plugin_table
from rlkit.errors import RecipeError
from rlkit.loop.folder import PACKAGES
from rlkit.registry import load_plugins

OPTIONAL = {"wandb": "pip install 'rlkit[wandb]'", "sglang": "pip install 'rlkit[sglang]'"}


def run(argv: Sequence[str]) -> int:
    """Print what is there; exit 2 where a plugin is broken."""
    if argv and argv[0] in ("-h", "--help"):
        print("usage: rlkit doctor")
        return 0
    if argv:
        raise RecipeError(f"rlkit doctor was given {' '.join(argv)!r}, expected nothing")
    console = Console(soft_wrap=True)
    table = Table("what", "found")
    for what, found in facts():
        table.add_row(what, escape(found))  # extras stand in brackets, as markup does
    console.print(table)
    registry = load_plugins()
    console.print(plugin_table(registry))
    return 2 if any(plugin.error for plugin in registry.plugins) else 0


def facts() -> list[tuple[str, str]]:
    """Give what matters about this machine."""
    rows = [("python", f"{platform.python_version()} on {platform.platform()}")]
    rows += [(name, metadata.version(name)) for name in PACKAGES]
    for name, remedy in OPTIONAL.items():
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, f"not installed ({remedy})"))
    rows.append(("processors", f"{os.cpu_count()}, torch uses {torch.get_num_threads()} threads"))
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    rows.append(("GPUs", ", ".join(gpus) or "none: runs use the processor"))
    return rows
