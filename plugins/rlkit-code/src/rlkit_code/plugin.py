"""The parts of this package, as a plugin has them."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_code.agent import CommandAgent
from rlkit_code.command_reward import CommandReward
from rlkit_code.harbor import Harbor
from rlkit_code.reward import CodeReward

__all__ = ["CodeReward", "CommandAgent", "CommandReward", "Harbor"]


@hookimpl
def rlkit_register(register: Register) -> None:
    for part in (CodeReward, CommandAgent, CommandReward, Harbor):
        register(part)
