"""The gateway of this package, as a plugin has it."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_agents.server import ChatGateway


@hookimpl
def rlkit_register(register: Register) -> None:
    register(ChatGateway)
