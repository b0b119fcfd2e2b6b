"""The contract of agents, and a client with the policy's turns in a script."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlkit.interfaces.agent import Agent, AgentResult, AgentTask, RoleClient
from rlkit.types import JsonObject, Message, Prompt
from rlkit_authors.conversations import PROMPT, check_close
from rlkit_authors.fields import check_filled
from rlkit_authors.runtime import ExampleRuntime


class ScriptedClient:
    """A client of an agent that returns texts in order, the last one again and again.

    Args:
        texts: The policy's turns.
    """

    url = "http://127.0.0.1:1"
    key = "key"
    model = "policy"

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts) or [""]
        self.asked: list[list[Message]] = []
        """The messages of each request."""
        self.roles: list[ScriptedRole] = []
        """The roles that the agent has opened."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the next turn."""
        self.asked.append(list(messages))
        text = self.texts[min(len(self.asked), len(self.texts)) - 1]
        return {"role": "assistant", "content": text, "refusal": None}

    def role(self, name: str) -> RoleClient:
        """Return a new conversation in a role."""
        role = ScriptedRole(name, self)
        self.roles.append(role)
        return role


@dataclass
class ScriptedRole:
    """A role's conversation: its name, the client that answers, and the reward that the agent sets."""

    name: str
    client: ScriptedClient
    reward: float | None = None

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the next turn."""
        return await self.client.chat(messages, tools, max_tokens)


def check_agent(make: Callable[[], Agent], prompt: Prompt = PROMPT) -> list[AgentResult]:
    """Check that an agent ends well whatever the policy writes, also in two rollouts at once; return the results.

    Args:
        make: The class, or a function that makes an agent.
        prompt: The prompt of the task.
    """
    check_close(make())  # as after a failure elsewhere, before `bind`
    agent = make()
    agent.bind(ExampleRuntime())

    async def run(folder: str, client: ScriptedClient) -> AgentResult:
        task = AgentTask(prompt, Path(tempfile.mkdtemp(dir=folder)), seed=0)
        result = await agent.run(task, client)
        if not isinstance(result, AgentResult) or not isinstance(result.status, int):
            raise AssertionError(f"{type(agent).__name__}.run returned {result!r}, expected an AgentResult")
        check_filled(agent, "run", result.fields)
        return result

    async def run_all(folder: str) -> list[AgentResult]:
        texts = ("4", "", "\x00{[(<", "yes")
        alone = await run(folder, ScriptedClient(*texts))
        together = await asyncio.gather(*(run(folder, ScriptedClient(*texts)) for _ in range(2)))
        if [result.output for result in together] != [alone.output] * 2:
            raise AssertionError(f"{type(agent).__name__}.run differs in two rollouts at once; keep nothing in self")
        return [alone, *together]

    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(run_all(folder))
