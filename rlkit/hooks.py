"""The extension surface: the hooks that a plugin implements, and the kinds of parts that it can register.

    from rlkit.hooks import hookimpl

    @hookimpl
    def rlkit_register(register):
        register(LengthReward)

and its pyproject.toml has `[project.entry-points.rlkit]` with `length-reward = "rlkit_length_reward"`. Once it is
installed, a recipe may have `reward: LengthReward`; its options are the typed, documented arguments of the class.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pluggy

from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.agent import Agent
from rlkit.interfaces.callback import Callback, Logger
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.launcher import Launcher
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.task import Curriculum, Task
from rlkit.interfaces.tool import Tool

hookspec = pluggy.HookspecMarker("rlkit")
hookimpl = pluggy.HookimplMarker("rlkit")

Register = Callable[[type], None]


@hookspec
def rlkit_register(register: Register) -> None:
    """Register classes that a recipe may name; the interface that a class subclasses determines its kind."""


@hookspec(firstresult=True)
def rlkit_recipes() -> Path | str | None:
    """Return a folder of recipes: `--recipe NAME` finds each `NAME.yaml` in it. They are read as data."""


class Kind(NamedTuple):
    """A kind of part: its singular name, the interface that its classes subclass, and its key in a recipe."""

    name: str
    interface: type
    key: str


KINDS: dict[str, Kind] = {
    "advantages": Kind("advantage", AdvantageEstimator, "advantage"),
    "losses": Kind("loss", PolicyLoss, "loss"),
    "rewards": Kind("reward", RewardManager, "reward"),
    "engines": Kind("engine", RolloutEngine, "rollout.engine"),
    "tasks": Kind("task", Task, "task"),
    "curricula": Kind("curriculum", Curriculum, "curriculum"),
    "filters": Kind("filter", GroupFilter, "rollout.filter"),
    "tools": Kind("tool", Tool, "tools"),
    "interactions": Kind("interaction", Interaction, "interaction"),
    "environments": Kind("environment", Environment, "environment"),
    "agents": Kind("agent", Agent, "agent"),
    "parsers": Kind("parser", ToolParser, "parser"),
    "callbacks": Kind("callback", Callback, "callbacks"),
    "loggers": Kind("logger", Logger, "log.loggers"),
    "optimizers": Kind("optimizer", Optimizer, "train.optimizer"),
    "schedules": Kind("schedule", Schedule, "train.schedule"),
    "launchers": Kind("launcher", Launcher, "launcher"),
}
"""All kinds of parts, by plural name; a part subclasses exactly one of the interfaces."""


def kinds_of(cls: type) -> list[str]:
    """Return the kinds whose interface a class subclasses: exactly one for a part."""
    return [kind for kind, (_, interface, _) in KINDS.items() if issubclass(cls, interface)]
