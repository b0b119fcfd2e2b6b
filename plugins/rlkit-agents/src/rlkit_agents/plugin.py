"""The gateway and the agent of this package, as a plugin has them."""

from __future__ import annotations

from rlkit.hooks import Register, hookimpl
from rlkit_agents.python_agent import PythonAgent
from rlkit_agents.server import ChatGateway


@hookimpl
def rlkit_register(register: Register) -> None:
    register(ChatGateway)
    register(PythonAgent)
