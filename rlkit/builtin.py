"""rlkit's own parts, registered through the same hooks as anybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlkit import advantages, engines, filters, interactions, losses, parsers, rewards, tasks, tools
from rlkit.hooks import hookimpl

Register = Callable[[type[Any]], None]


def _register_all(package: Any, register: Register) -> None:
    for name in package.__all__:
        register(getattr(package, name))


@hookimpl
def rlkit_register_advantages(register: Register) -> None:
    _register_all(advantages, register)


@hookimpl
def rlkit_register_losses(register: Register) -> None:
    _register_all(losses, register)


@hookimpl
def rlkit_register_rewards(register: Register) -> None:
    _register_all(rewards, register)


@hookimpl
def rlkit_register_engines(register: Register) -> None:
    _register_all(engines, register)


@hookimpl
def rlkit_register_tasks(register: Register) -> None:
    _register_all(tasks, register)


@hookimpl
def rlkit_register_filters(register: Register) -> None:
    _register_all(filters, register)


@hookimpl
def rlkit_register_parsers(register: Register) -> None:
    _register_all(parsers, register)


@hookimpl
def rlkit_register_tools(register: Register) -> None:
    _register_all(tools, register)


@hookimpl
def rlkit_register_interactions(register: Register) -> None:
    _register_all(interactions, register)
