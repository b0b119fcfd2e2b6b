"""Mistakes in plugins that would otherwise be silent: read off their classes, their modules and their metadata.

Each function returns what is wrong, phrased for a message that names the plugin.
"""

from __future__ import annotations

import ast
import difflib
import inspect
from collections import Counter
from collections.abc import Iterator

from rlkit import hooks

SLOW_IMPORT = 3.0
"""Seconds; a plugin whose import takes longer is named in a note."""

SIMILAR = 0.85
"""Methods whose names are at least this similar, by difflib, are taken for misspelt overrides."""

HOOKS = tuple(name for name in vars(hooks) if name.startswith("rlkit_"))


def method_problems(cls: type) -> Iterator[str]:
    """Yield each override of an interface's method that cannot be called as rlkit calls it."""
    for name, base in _interface_methods(cls).items():
        override = inspect.getattr_static(cls, name)
        if override is base:
            continue
        function = override.__func__ if isinstance(override, staticmethod | classmethod) else override
        what = f"{cls.__name__}.{name}"
        if not callable(function):
            yield f"{what} is a {type(function).__name__}, expected a method"
            continue
        if inspect.iscoroutinefunction(base) and not _awaitable(function):
            yield f"{what} is a plain function, expected a coroutine: write `async def {name}`"
        elif inspect.iscoroutinefunction(function) and not _awaitable(base):
            yield f"{what} is a coroutine, which nobody awaits: write `def {name}`"
        if (problem := _signature_problem(override, function, base)) is not None:
            yield f"{what}{problem}"


def misspelt_methods(cls: type) -> Iterator[str]:
    """Yield each public method that looks like a misspelt override of an interface's method: it is never called."""
    methods = _interface_methods(cls)
    theirs = [owner for owner in cls.__mro__ if not _is_ours(owner)]
    own = {name: member for owner in reversed(theirs) for name, member in vars(owner).items()}
    event_methods = any(name.startswith("on_") for name in methods)
    for name, member in own.items():
        if name.startswith("_") or not inspect.isroutine(member) or _inherited(cls, name):
            continue
        near = difflib.get_close_matches(name, methods, 1, 0.0)
        if not near:
            continue
        similar = difflib.SequenceMatcher(None, name, near[0]).ratio() >= SIMILAR and near[0] not in own
        if similar or (event_methods and name.startswith("on_")):
            yield f"{cls.__name__}.{name} is never called; did you mean `{near[0]}`?"


def duplicate_hooks(module: object) -> Iterator[str]:
    """Yield each hook that a module's source defines more than once, of which Python keeps the last alone."""
    try:
        tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    except (OSError, TypeError, SyntaxError, ValueError):
        return
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for name, count in Counter(names).items():
        if name in HOOKS and count > 1:
            yield f"it defines {name} {count} times, and Python keeps the last alone; merge them into one function"


def unmarked_hooks(module: object) -> Iterator[str]:
    """Yield each function that is named like a hook and is not marked as one."""
    for name, member in list(getattr(module, "__dict__", {}).items()):
        near = difflib.get_close_matches(name, HOOKS, 1, SIMILAR)
        marked = hasattr(member, "rlkit_impl") or hasattr(member, "rlkit_spec")
        if near and inspect.isfunction(member) and not marked:
            hint = "" if name in HOOKS else f" and named `{near[0]}`"
            yield f"its function {name} is never called; it must be marked with `@hookimpl` of rlkit{hint}"


def _interface_methods(cls: type) -> dict[str, object]:
    """Return the public functions of a class's nearest classes in `rlkit.interfaces`."""
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


def _inherited(cls: type, name: str) -> bool:
    return any(name in vars(owner) for owner in cls.__mro__ if _is_ours(owner))


def _awaitable(function: object) -> bool:
    """Whether a function returns what can be awaited, as far as it says; one that a decorator wraps counts too."""
    unwrapped = inspect.unwrap(function)  # type: ignore[arg-type]
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(unwrapped):
        return True
    returns = str(getattr(unwrapped, "__annotations__", {}).get("return", ""))
    return any(word in returns for word in ("Awaitable", "Coroutine", "Future", "Task"))


def _signature_problem(override: object, function: object, base: object) -> str | None:
    """Return what is wrong with a signature for the positional arguments that rlkit passes."""
    parameters = list(inspect.signature(base).parameters.values())[1:]  # type: ignore[arg-type]
    passed = [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # of a function in C
        return None
    receiver = [] if isinstance(override, staticmethod) else ["self"]
    try:
        signature.bind(*receiver, *passed)
    except TypeError as error:
        return f"{signature} is called with ({', '.join(passed)}): {error}"
    return None
