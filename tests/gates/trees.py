"""The Python files that come with rlkit, and their syntax trees, each parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.conftest import ROOT

PLUGINS = {path.parent.name.replace("-", "_") for path in ROOT.glob("plugins/*/src")}
SHELF = PLUGINS - {path.parent.name.replace("-", "_") for path in ROOT.glob("plugins/*/pyproject.toml")}
"""Packages in `plugins/` that come in rlkit's own wheel."""

CORE = [*ROOT.glob("rlkit/**/*.py")]
SHIPPED = CORE + [path for name in sorted(SHELF) for path in ROOT.glob(f"plugins/*/src/{name}/**/*.py")]
"""The files of rlkit's wheel."""


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file, which no test may change."""
    return ast.parse(path.read_text(encoding="utf-8"))
