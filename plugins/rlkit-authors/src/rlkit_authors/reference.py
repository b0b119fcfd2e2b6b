"""What plugins are written against, for `rlkit plugins show`: the types of a step, and the interfaces."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from enum import Enum
from importlib import import_module
from itertools import pairwise, zip_longest
from pkgutil import iter_modules
from textwrap import dedent, indent
from typing import Any

from rlkit import interfaces, types
from rlkit.types import prompt


def public_classes() -> dict[str, type]:
    """Return all public classes of `rlkit.types` and `rlkit.interfaces`, by name."""
    packages = (types, interfaces)
    names = [f"{package.__name__}.{module.name}" for package in packages for module in iter_modules(package.__path__)]
    modules = [import_module(name) for name in names]
    return {
        name: value
        for module in modules
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
    }


def aliases() -> dict[str, str]:
    """Return the documentation of the names in `rlkit.types` that are no classes, such as `Message`."""
    statements = ast.parse(inspect.getsource(prompt)).body
    texts = {}
    for statement, after in pairwise(statements):
        text = _text_of(after)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name) and text:
            name = statement.targets[0].id
            texts[name] = f"{name}  (from rlkit.types import {name})\n\n{text}\n\n{ast.unparse(statement)}"
    return texts


def describe(cls: type) -> str:
    """Describe a class: its docstring, with its fields, then its members with theirs."""
    members = "\n\n".join(f"    {head}\n{indent(doc, ' ' * 8)}".rstrip() for head, doc in _members(cls))
    module = types.__name__ if cls.__module__.startswith(f"{types.__name__}.") else cls.__module__
    text = f"{cls.__name__}  (from {module} import {cls.__name__})\n\n{inspect.cleandoc(cls.__doc__ or '')}"
    for base in filter(is_dataclass, cls.__mro__[1:]):
        text += f"\n\nIt is a {base.__name__}: {inspect.cleandoc(base.__doc__ or '')}"
    return f"{text}\n\nMembers:\n\n{members}" if members else text


def _members(cls: type) -> Iterator[tuple[str, str]]:
    """Yield the attributes, properties and methods of a class and of rlkit's classes that it extends, these first."""
    bases = [base for base in reversed(cls.__mro__) if base.__module__.startswith("rlkit.")]
    attributes: dict[str, tuple[str, str]] = {}
    for base in bases:
        for name, head, text in _attributes(base):
            attributes[name] = (head, text or attributes.get(name, ("", ""))[1])
    yield from attributes.values()
    for name, member in {name: member for base in bases for name, member in vars(base).items()}.items():
        function: Any = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        doc = inspect.getdoc(function) if inspect.isfunction(function) or isinstance(function, property) else None
        if doc is None or (name.startswith("_") and name != "__call__"):
            continue
        if isinstance(function, property):
            yield f"{name}: {inspect.signature(function.fget).return_annotation}", doc  # type: ignore[arg-type]
        else:
            kind = "async def" if inspect.iscoroutinefunction(function) else "def"
            plain = str(inspect.signature(function)).replace("'", "")
            yield (
                f"{kind} {name}{plain}" + ("  (abstract)" if getattr(function, "__isabstractmethod__", False) else ""),
                doc,
            )


def _attributes(cls: type) -> Iterator[tuple[str, str, str]]:
    """Yield the name of each attribute or flag in a class's source, the name with its type, and the text below it.

    The docstrings of dataclasses and named tuples list theirs.
    """
    if is_dataclass(cls) or hasattr(cls, "_fields"):
        return
    [definition] = ast.parse(dedent(inspect.getsource(cls))).body
    statements = definition.body  # type: ignore[attr-defined]
    for statement, after in zip_longest(statements, statements[1:]):
        if isinstance(statement, ast.AnnAssign):
            name, head = ast.unparse(statement.target), ast.unparse(statement)
        elif isinstance(statement, ast.Assign) and issubclass(cls, Enum):
            name = head = ast.unparse(statement.targets[0])
        else:
            continue
        if not name.startswith("_"):
            yield name, head, _text_of(after)


def _text_of(statement: ast.stmt | None) -> str:
    """Return the text that a statement consists of; empty for any other statement."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return inspect.cleandoc(str(statement.value.value))
    return ""
