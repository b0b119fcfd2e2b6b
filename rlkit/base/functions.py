"""The functions that a recipe names: checked without running any code, and loaded."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

from rlkit.base.errors import RecipeError, explain
from rlkit.base.files import nearby
from rlkit.base.text import similar

DYNAMIC = {"__getattr__", "exec", "globals", "setattr", "vars"}
"""Names by which a file may define functions that its syntax tree does not show."""


def require_function(part: str, function: str, allow_code: bool) -> None:
    """Check the function that a part of a recipe names, without running it.

    Args:
        part: Name of the part's class.
        function: `file.py:name` or `package.module:name`.
        allow_code: Whether the recipe allows to run its code.

    Raises:
        RecipeError: It has another form, its code is not allowed to run, or its file does not define it.
    """
    module, _, name = function.rpartition(":")
    if not module or not name.isidentifier():
        raise RecipeError(f"{part} has function={function!r}, expected file.py:name or package.module:name")
    if not allow_code:
        raise RecipeError(f"{part} names {function!r}, whose code would run; set allow_code: true if you trust it")
    if module.endswith(".py") and not os.path.isfile(module):
        raise RecipeError(f"{part} has function={function!r}, but there is no file {module!r}; {nearby(Path(module))}")
    problem = missing_function(function)
    if problem is not None:
        raise RecipeError(f"{part} has function={function!r}, but {problem}")


def load_function(function: str) -> Callable[..., object]:
    """Import a function; a file is run again by each call.

    Args:
        function: `file.py:name` or `package.module:name`.

    Raises:
        AttributeError: The module does not define it.
        Exception: Whatever importing the module raises.
    """
    path, _, name = function.rpartition(":")
    if path.endswith(".py"):
        spec = importlib.util.spec_from_file_location("rlkit_user_code", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        module = importlib.import_module(path)
    functions = [n for n, value in vars(module).items() if callable(value) and not n.startswith("_")]
    if name not in functions:
        raise AttributeError(no_function(path, name, functions))
    return getattr(module, name)  # type: ignore[no-any-return]


load_once = cache(load_function)
"""Imports a function once per process, since its module may keep state."""


def missing_function(function: str) -> str | None:
    """Explain why a file does not define a function; None if it does, or if only running the file would show it.

    Args:
        function: `file.py:name`; a module is not examined, since finding it may import its packages.
    """
    path, _, name = function.rpartition(":")
    if not path.endswith(".py"):
        return None
    try:
        with open(path, "rb") as file:
            tree = ast.parse(file.read(), path)
    except (OSError, RecursionError):  # reported when the file is loaded
        return None
    except (SyntaxError, ValueError) as error:
        return f"{path} is not valid Python: {explain(error)}"
    nodes = list(module_level(tree))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    functions += [node.asname or node.name for node in nodes if isinstance(node, ast.alias)]
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    words = (getattr(node, "id", getattr(node, "name", None)) for node in ast.walk(tree))
    is_dynamic = not DYNAMIC.isdisjoint(words) or any(isinstance(node, ast.Global) for node in ast.walk(tree))
    if is_dynamic or name in functions or name in assigned or "*" in functions:
        return None
    return no_function(path, name, functions)


def no_function(path: str, name: str, functions: Sequence[str]) -> str:
    """Return the message about a name that is none of a file's functions, with the nearest of them."""
    public = [function for function in functions if not function.startswith("_")]
    return f"{path} has no function {name!r}; {similar(name, public, 'it defines')}"


def module_level(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes that importing the file runs: not those inside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield from module_level(child)
