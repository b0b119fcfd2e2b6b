"""Generic checks of all parts of a plugin: `check_plugin("my-tool", rlkit_my_tool)`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlkit import __version__
from rlkit.base.errors import RecipeError, explain_foreign
from rlkit.base.installed import DISTRIBUTION, Plugin
from rlkit.base.verbs import VERBS
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.runtime import RunPart
from rlkit.interfaces.task import Task
from rlkit.registry import Part, Registry, load_plugins
from rlkit.types import Prompt
from rlkit_authors import contracts, conversations, golden
from rlkit_authors.agents import check_agent
from rlkit_authors.limits import time_limit
from rlkit_authors.runtime import ExampleRuntime

CONTRACTS: dict[str, Callable[..., object]] = {
    "advantages": contracts.check_advantage,
    "losses": contracts.check_loss,
    "rewards": contracts.check_reward,
    "tasks": contracts.check_task,
    "curricula": contracts.check_curriculum,
    "filters": contracts.check_filter,
    "parsers": contracts.check_parser,
    "callbacks": contracts.check_callback,
    "loggers": contracts.check_logger,
    "optimizers": contracts.check_optimizer,
    "schedules": contracts.check_schedule,
    "launchers": contracts.check_launcher,
}
"""Contracts that take an instance, by kind."""

MAKER_CONTRACTS: dict[str, Callable[..., object]] = {
    "agents": check_agent,
    "tools": conversations.check_tool,
    "interactions": conversations.check_interaction,
    "engines": conversations.check_engine,
}
"""Contracts that take the class, by kind."""

SECONDS = 60.0
"""Time limit of a check."""
LOADING_SECONDS = {"tasks": 600.0, "engines": 600.0}
"""Time limits of kinds that may load a data set or start a server."""


class Finding(NamedTuple):
    """The result of a check, with the reason unless it is `ok`; `not run` where options or data are missing."""

    part: str
    check: str
    state: Literal["ok", "failed", "not run"]
    why: str = ""


def check_plugin(name: str, module: object) -> list[Finding]:
    """Run all checks on a plugin's module, for use in its tests.

    Raises:
        AssertionError: A check failed; the message lists all that did.
        PluginError: The plugin cannot be loaded.
    """
    registry = load_plugins([(name, module)], entry_points=False)
    registry.require_healthy()
    findings = examine(registry.plugins[-1], registry)
    failures = [f"{f.part}, {f.check}: {f.why}" for f in findings if f.state == "failed"]
    if failures:
        raise AssertionError("\n".join(failures))
    return findings


def examine(plugin: Plugin, registry: Registry, begin: Callable[[str], None] | None = None) -> list[Finding]:
    """Run all checks on a plugin.

    Args:
        plugin: The plugin to check.
        registry: The registry that has its parts.
        begin: Called with the name of each part and verb before its checks.
    """
    if plugin.error is not None or plugin.disabled:
        return [Finding(plugin.name, "loads", "failed", plugin.error or "it is disabled")]
    parts = [part for parts in registry.parts.values() for part in parts.values() if part.plugin is plugin]
    recipes = [name for name, (_, owner) in registry.recipes.items() if owner is plugin]
    if not (parts or recipes or plugin.commands):
        why = "it has no parts, recipes or verbs; is a hook marked with @hookimpl?"
        return [Finding(plugin.name, "offers parts", "failed", why)]
    findings = []
    if plugin.hooks or plugin.commands:
        findings.append(_run(plugin.name, "made for a range of rlkit", _check_range, plugin))
    for verb in plugin.commands:
        if begin is not None:
            begin(f"rlkit {verb}")
        findings += _examine_verb(plugin, verb)
    findings += [_run(name, "begins with what it is", _check_recipe, registry.recipes[name].path) for name in recipes]
    tasks = [part.cls for part in parts if part.kind == "tasks"]
    for part in parts:
        if begin is not None:
            begin(part.name)
        findings += _examine_part(part, tasks)
    return findings


def _check_recipe(path: Path) -> None:
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    if not re.match(r"# *\S", first):
        raise AssertionError(f"{path.name} begins with {first!r}, expected `# ...`, which `rlkit recipe list` prints")


def _check_range(plugin: Plugin) -> None:
    if not plugin.made_for:
        raise AssertionError(
            f"it would be loaded by any rlkit; state the versions that it is made for: dependencies = "
            f'["{DISTRIBUTION}>={__version__},<..."]'
        )


def _examine_verb(plugin: Plugin, verb: str) -> Iterator[Finding]:
    if verb in VERBS:
        yield Finding(f"rlkit {verb}", "name", "failed", "it is rlkit's own verb, which no plugin can replace")
    yield _run(f"rlkit {verb}", "can be called", _check_verb, plugin.commands[verb])


def _check_verb(entry: EntryPoint) -> None:
    function = entry.load()
    if not callable(function):
        raise AssertionError(f"{entry.value} is {function!r}, expected a function of the words after the verb")


def check_options(cls: type) -> None:
    """Check that each option of a constructor has a name, a type and a line of documentation, also a base class's."""
    documented = "\n".join(base.__doc__ or "" for base in cls.__mro__)
    for name, option in inspect.signature(cls).parameters.items():
        if option.kind in (option.VAR_POSITIONAL, option.VAR_KEYWORD):
            raise AssertionError(f"{cls.__name__} takes *{name}, expected named options, which a recipe can set")
        if option.annotation is option.empty:
            raise AssertionError(f"{cls.__name__}.{name} has no type; a recipe's value is checked against it")
        if not re.search(rf"^\s+{name}: ", documented, re.M):
            raise AssertionError(
                f"{cls.__name__}.{name} is not documented; add `{name}: …` under Args: in its docstring"
            )


def _examine_part(part: Part, tasks: Sequence[type[Task]]) -> Iterator[Finding]:
    yield _run(part.name, "options", check_options, part.cls)
    needed = [p.name for p in inspect.signature(part.cls).parameters.values() if p.default is p.empty]
    if needed:
        yield Finding(part.name, "contract", "not run", f"it needs options: {', '.join(needed)}")
        return
    construction = _run(part.name, "constructed with defaults", part.cls)
    yield construction
    if construction.state != "ok":
        return
    prompts = _prompts(tasks) if part.kind == "environments" else []
    yield _run(part.name, "contract", _check_contract, part, prompts, seconds=LOADING_SECONDS.get(part.kind, SECONDS))
    if part.name in (*golden.ADVANTAGES, *golden.LOSSES) and part.kind in ("advantages", "losses"):
        yield _run(part.name, "golden vector", golden.check, part.name, part.cls(**golden.OPTIONS.get(part.name, {})))


def _check_contract(part: Part, prompts: Sequence[Prompt]) -> None:
    cls: type[Any] = part.cls
    if part.kind == "environments":
        _check_environment(cls, prompts)
    elif part.kind in MAKER_CONTRACTS:
        MAKER_CONTRACTS[part.kind](cls)
    else:
        instance = cls()
        if hasattr(instance, "bind"):
            instance.bind(ExampleRuntime())
        CONTRACTS[part.kind](instance)
        if isinstance(instance, RunPart):
            conversations.check_close(instance)
            conversations.check_close(cls())  # as after a failure elsewhere, before `bind`


def _check_environment(cls: type[Environment], prompts: Sequence[Prompt]) -> None:
    """Check an environment on the first prompt that it accepts, starting with those of the plugin's own tasks."""
    for number, prompt in enumerate(prompts, 1):
        try:
            conversations.check_environment(cls, prompt)
        except RecipeError:
            if number == len(prompts):
                raise
        else:
            return


def _prompts(tasks: Sequence[type[Task]]) -> list[Prompt]:
    """Return a prompt of each task, followed by an example."""
    prompts = []
    for task in tasks:
        with suppress(Exception), time_limit(task.__name__, LOADING_SECONDS["tasks"]):  # reported by its own checks
            prompts += contracts.check_task(task())[:1]
    return [*prompts, conversations.PROMPT]


def _run(
    name: str, check: str, function: Callable[..., object], *arguments: object, seconds: float = SECONDS
) -> Finding:
    try:
        with time_limit("it", seconds):
            function(*arguments)
    except RecipeError as error:
        return Finding(name, check, "not run", str(error))
    except AssertionError as error:
        return Finding(name, check, "failed", str(error) or "an assertion of its own failed")
    except (Exception, SystemExit) as error:  # a plugin's own code may raise anything
        return Finding(name, check, "failed", explain_foreign(error))
    return Finding(name, check, "ok")
