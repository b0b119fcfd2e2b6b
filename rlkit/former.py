"""Former names of what packages use: paths of modules, and booleans of engines. They end in `REMOVED_IN`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from enum import Flag
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FORMER = {
    "rlkit.base.command": "rlkit_code.command",
    "rlkit.base.sandbox": "rlkit_code.sandbox",
    "rlkit.engines.server": "rlkit_servers",
    "rlkit.engines.sglang": "rlkit_servers.sglang.engine",
    "rlkit.engines.sglang_changes": "rlkit_servers.sglang.changes",
    "rlkit.engines.torch": "rlkit_engine_torch",
    "rlkit.errors": "rlkit.base.errors",
    "rlkit.gateway": "rlkit_agents",
    "rlkit.names": "rlkit.base.names",
    "rlkit.ops.answers": "rlkit_math.answers",
    "rlkit.ops.sampling": "rlkit_engine_torch.sampling",
    "rlkit.ranges": "rlkit.base.ranges",
    "rlkit.records.comparison": "rlkit_report.comparison",
    "rlkit.records.files": "rlkit_report.files",
    "rlkit.records.headline": "rlkit_report.headline",
    "rlkit.rewards.code": "rlkit_code.reward",
    "rlkit.rewards.command": "rlkit_code.command_reward",
    "rlkit.rewards.composite": "rlkit_rewards.composite",
    "rlkit.rewards.judge": "rlkit_judges.judge",
    "rlkit.rewards.math": "rlkit_math.reward",
    "rlkit.rewards.model": "rlkit_rewards.model",
    "rlkit.rewards.qa": "rlkit_rewards.qa",
    "rlkit.rewards.remote": "rlkit_rewards.remote",
    "rlkit.rewards.router": "rlkit_rewards.router",
    "rlkit.rewards.rubric": "rlkit_judges.rubric",
    "rlkit.roles": "rlkit.interfaces",
    "rlkit.sections": "rlkit.recipe",
    "rlkit.tasks.files": "rlkit_tasks.files",
    "rlkit.tasks.mix": "rlkit_tasks.mix",
    "rlkit.tasks.rows": "rlkit_tasks.rows",
    "rlkit.tasks.sources": "rlkit_tasks.sources",
    "rlkit.tasks.template": "rlkit.interfaces.rows",
    "rlkit.text": "rlkit.base.text",
}
"""The module that each former path leads to; a package's modules have moved with it."""

REMOVED_IN = "0.2"
"""The version of rlkit in which the former paths end."""


def moved(name: str) -> str | None:
    """Return the path of a module that moved, by its former one; None for any other."""
    for former, path in FORMER.items():
        if name == former or name.startswith(f"{former}."):
            return path + name.removeprefix(former)
    return None


class FormerPaths(MetaPathFinder, Loader):
    """Finds a module by a former path, after all other finders, and warns about the path."""

    def __init__(self) -> None:
        self.imported: dict[str, str] = {}
        """The former names that were used since the last `take_imported`, and those that they lead to."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former path; None for any other."""
        return None if moved(name) is None else ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return a module whose names are looked up in the one that moved."""
        path = str(moved(spec.name))
        module, target = ModuleType(spec.name), import_module(path)
        self.imported[spec.name] = path
        warnings.warn(f"{spec.name} is now {path}, and ends in rlkit {REMOVED_IN}", DeprecationWarning, stacklevel=2)
        vars(module).update({name: value for name, value in vars(target).items() if not name.startswith("__")})
        vars(module)["__getattr__"] = partial(_public, target)  # for names that it imports when they are asked for
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: the module that moved has run."""


def _public(module: ModuleType, name: str) -> object:
    """Return a name of a module, but for those of the import system: `__path__` would import submodules again."""
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(module, name)


_PATHS = FormerPaths()


def serve_former_paths() -> None:
    """Let `import` find the former paths."""
    if _PATHS not in sys.meta_path:
        sys.meta_path.append(_PATHS)


class FormerFlag:
    """A boolean attribute of engines, and of their classes, that is one of their `capabilities` now."""

    def __init__(self, capability: Flag) -> None:
        self.capability = capability

    def __set_name__(self, cls: Any, name: str) -> None:
        self.name = name

    def __get__(self, engine: Any, cls: Any) -> bool:
        return self.capability in (cls if engine is None else engine).capabilities

    def __set__(self, engine: Any, value: bool) -> None:
        message = f"`{self.name}` of engines is {self.capability} in `capabilities`, and ends in rlkit {REMOVED_IN}"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        others = engine.capabilities & ~self.capability
        engine.capabilities = others | self.capability if value else others


class FormerFlags:
    """A class with `capabilities` whose subclasses may set former flags.

    Raises:
        TypeError: A former flag is no boolean.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        flags = [flag for base in cls.__mro__[1:] for flag in vars(base).values() if isinstance(flag, FormerFlag)]
        for flag in [flag for flag in flags if flag.name in vars(cls)]:
            value, attribute = vars(cls)[flag.name], f"{cls.__name__}.{flag.name}"
            if not isinstance(value, bool):
                raise TypeError(
                    f"{attribute} is {value!r}, expected true or false; set `capabilities` in `__init__`, with "
                    f"{flag.capability} or without it"
                )
            delattr(cls, flag.name)
            _PATHS.imported[attribute] = str(flag.capability)
            flag.__set__(cls, value)


def take_imported() -> str | None:
    """Name the former names used since the last call, in a note; None if there are none."""
    imported, _PATHS.imported = _PATHS.imported, {}
    for name in imported:
        sys.modules.pop(name, None)  # so that the next import is seen, too
    modules = [name for name in imported if not any(path.startswith(f"{name}.") for path in imported)]
    if not modules:
        return None
    listed = ", ".join(f"{name} (now {imported[name]})" for name in modules)
    return f"it uses {listed}; the former names end in rlkit {REMOVED_IN}"
