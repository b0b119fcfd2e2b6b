"""Syntax trees of Python files, each parsed once in a process."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the tree of a file, which no test may change."""
    return ast.parse(path.read_text(encoding="utf-8"))
