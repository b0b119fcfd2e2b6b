"""The whole extension surface: a plugin implements any of these hooks and registers its classes.

    from rlkit import hookimpl

    @hookimpl
    def rlkit_register_rewards(register):
        register(LengthReward)

and its pyproject.toml says `[project.entry-points.rlkit]` `length-reward = "rlkit_length_reward"`. From then on
`reward: LengthReward` works in a recipe, the constructor's typed and documented signature being the configuration.
"""

from __future__ import annotations

from collections.abc import Callable

import pluggy

from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.task import Task
from rlkit.interfaces.tool import Tool

hookspec = pluggy.HookspecMarker("rlkit")
hookimpl = pluggy.HookimplMarker("rlkit")


@hookspec
def rlkit_register_advantages(register: Callable[[type[AdvantageEstimator]], None]) -> None:
    """Offer advantage estimators: from rewards to credit for each token."""


@hookspec
def rlkit_register_losses(register: Callable[[type[PolicyLoss]], None]) -> None:
    """Offer policy losses."""


@hookspec
def rlkit_register_rewards(register: Callable[[type[RewardManager]], None]) -> None:
    """Offer rewards: functions that run in a worker, or managers that run beside the trainer."""


@hookspec
def rlkit_register_engines(register: Callable[[type[RolloutEngine]], None]) -> None:
    """Offer rollout engines."""


@hookspec
def rlkit_register_tasks(register: Callable[[type[Task]], None]) -> None:
    """Offer tasks: where prompts come from."""


@hookspec
def rlkit_register_filters(register: Callable[[type[GroupFilter]], None]) -> None:
    """Offer filters: which groups are worth learning from."""


@hookspec
def rlkit_register_tools(register: Callable[[type[Tool]], None]) -> None:
    """Offer tools that the policy may call."""


@hookspec
def rlkit_register_interactions(register: Callable[[type[Interaction]], None]) -> None:
    """Offer simulated users."""


@hookspec
def rlkit_register_environments(register: Callable[[type[Environment]], None]) -> None:
    """Offer environments: text games and the like."""


@hookspec
def rlkit_register_parsers(register: Callable[[type[ToolParser]], None]) -> None:
    """Offer parsers of tool calls."""


ROLES: dict[str, type] = {
    "advantages": AdvantageEstimator,
    "losses": PolicyLoss,
    "rewards": RewardManager,
    "engines": RolloutEngine,
    "tasks": Task,
    "filters": GroupFilter,
    "tools": Tool,
    "interactions": Interaction,
    "environments": Environment,
    "parsers": ToolParser,
}
"""What each hook registers: `rlkit_register_<role>` takes subclasses of the class."""
