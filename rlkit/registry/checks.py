"""Checks of plugins for mistakes that would otherwise be silent, in their classes and modules.

Each function yields or returns problems, worded for a message that names the plugin.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections import Counter
from collections.abc import Iterator
from functools import cache

from rlkit import hooks
from rlkit.base.errors import with_definition

SLOW_IMPORT = 3.0
"""Seconds of a plugin's import beyond which a note names it."""

SIMILAR = 0.85
"""The similarity of names, by difflib, from which a method is taken for a misspelt override."""

HOOKS = tuple(name for name in vars(hooks) if name.startswith("rlkit_"))


@cache
def method_problems(cls: type) -> tuple[str, ...]:
    """Return a problem for each override of an interface's method that rlkit cannot call."""
    return tuple(_method_problems(cls))


def _method_problems(cls: type) -> Iterator[str]:
    for name, base in _interface_methods(cls).items():
        override = inspect.getattr_static(cls, name)
        if override is base:
            continue
        function = override.__func__ if isinstance(override, staticmethod | classmethod) else override
        method = f"{cls.__name__}.{name}"
        if not callable(function):
            yield with_definition(f"{method} is a {type(function).__name__}, expected a method", cls)
            continue
        if inspect.iscoroutinefunction(base) and not _awaitable(function):
            problem = f"{method} is a plain function, expected a coroutine: write `async def {name}`"
            yield with_definition(problem, cls, name)
        elif inspect.iscoroutinefunction(function) and not _awaitable(base):
            yield with_definition(f"{method} is a coroutine, which is never awaited: write `def {name}`", cls, name)
        mismatch = _signature_problem(override, function, base)
        if mismatch is not None:
            yield with_definition(f"{method}{mismatch}", cls, name)


@cache
def misspelt_methods(cls: type) -> tuple[str, ...]:
    """Return a problem for each public method that looks like a misspelt override, which is never called."""
    return tuple(_misspelt_methods(cls))


def _misspelt_methods(cls: type) -> Iterator[str]:
    methods = _interface_methods(cls)
    plugin_classes = [owner for owner in cls.__mro__ if not _is_ours(owner)]
    members = {name: member for owner in reversed(plugin_classes) for name, member in vars(owner).items()}
    event_methods = any(name.startswith("on_") for name in methods)
    for name, member in members.items():
        inherited = any(name in vars(owner) for owner in cls.__mro__ if _is_ours(owner))
        if name.startswith("_") or not inspect.isroutine(member) or inherited:
            continue
        near = difflib.get_close_matches(name, methods, 1, 0.0)
        if not near:
            continue
        similar = difflib.SequenceMatcher(None, name, near[0]).ratio() >= SIMILAR and near[0] not in members
        if similar or (event_methods and name.startswith("on_")):
            problem = f"{cls.__name__}.{name} is never called; did you mean `{near[0]}`?"
            yield with_definition(problem, cls, name)


def duplicate_hooks(module: object) -> Iterator[str]:
    """Yield a problem for each hook that a module defines more than once: Python keeps only the last."""
    try:
        tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for name, count in Counter(names).items():
        if name in HOOKS and count > 1:
            problem = f"it defines {name} {count} times, and Python keeps only the last; merge them into one function"
            yield with_definition(problem, module, name)


def unmarked_hooks(module: object) -> Iterator[str]:
    """Yield a problem for each function that is named like a hook but not marked as one."""
    for name, member in list(getattr(module, "__dict__", {}).items()):
        near = difflib.get_close_matches(name, HOOKS, 1, SIMILAR)
        marked = hasattr(member, "rlkit_impl") or hasattr(member, "rlkit_spec")
        if near and inspect.isfunction(member) and not marked:
            hint = "" if name in HOOKS else f" and named `{near[0]}`"
            problem = f"its function {name} is never called; it must be marked with `@hookimpl` of rlkit{hint}"
            yield with_definition(problem, member)


def _interface_methods(cls: type) -> dict[str, object]:
    """Return the public methods of a class's interfaces, the nearest definition of each."""
    methods: dict[str, object] = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__.startswith("rlkit.interfaces."):
            methods |= {
                name: member
                for name, member in vars(owner).items()
                if inspect.isfunction(member) and not name.startswith("_")
            }
    return methods


def _is_ours(owner: type) -> bool:
    return owner.__module__.partition(".")[0] in ("rlkit", "builtins", "abc", "typing")


def _awaitable(function: object) -> bool:
    """Whether a function, or the one that a decorator wraps, returns an awaitable as far as its annotation says."""
    unwrapped = inspect.unwrap(function)  # type: ignore[arg-type]
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(unwrapped):
        return True
    returns = str(getattr(unwrapped, "__annotations__", {}).get("return", ""))
    return any(word in returns for word in ("Awaitable", "Coroutine", "Future", "Task"))


def _signature_problem(override: object, function: object, base: object) -> str | None:
    """Return the reason why a signature does not take the positional arguments that rlkit passes; None if it does."""
    parameters = list(inspect.signature(base).parameters.values())[1:]  # type: ignore[arg-type]
    passed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a function in C has no signature
        return None
    receiver = [] if isinstance(override, staticmethod) else ["self"]
    try:
        signature.bind(*receiver, *passed)
    except TypeError as error:
        return f"{signature} is called with ({', '.join(passed)}): {error}"
    return None
