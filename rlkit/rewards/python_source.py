"""The functions that a Python file defines, read from its syntax tree: nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

from rlkit.base.errors import explain

DYNAMIC = {"__getattr__", "exec", "globals", "setattr", "vars"}
"""Names by which a file may define functions that its syntax tree does not show."""


def missing_function(function: str) -> str | None:
    """Return why a file does not define a function; None if it does, or if only running the file would show it.

    Args:
        function: `file.py:name`; a module is not examined, since finding it may import its packages.
    """
    path, _, name = function.rpartition(":")
    if not path.endswith(".py"):
        return None
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read())
    except (OSError, RecursionError):  # reported when the file is loaded
        return None
    except (SyntaxError, ValueError) as error:
        return f"{path} is not valid Python: {explain(error)}"
    nodes = list(_module_level(tree))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    functions += [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    if name in functions or name in assigned or "*" in functions or _is_dynamic(tree):
        return None
    return no_function(path, name, functions)


def no_function(path: str, name: str, functions: Sequence[str]) -> str:
    """Return the message about a name that is none of a file's functions, with the nearest of them."""
    public = [function for function in functions if not function.startswith("_")]
    similar = get_close_matches(name, public, 1)
    hint = f"did you mean {similar[0]!r}?" if similar else f"it defines: {', '.join(public) or 'none'}"
    return f"{path} has no function {name!r}; {hint}"


def _module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that importing the file runs: not those inside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from _module_level(child)


def _is_dynamic(tree: ast.AST) -> bool:
    """Whether the file may define names that its syntax tree does not show."""
    return any(
        isinstance(node, ast.Global) or getattr(node, "id", getattr(node, "name", None)) in DYNAMIC
        for node in ast.walk(tree)
    )
