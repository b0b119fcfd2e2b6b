"""The interface of tools, which the policy may call during a conversation."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NamedTuple

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import JsonObject

State = dict[str, Any]
"""What a tool, an interaction or an environment stores for one conversation; empty at its start."""


class ToolReply(NamedTuple):
    """The result of a call.

    Args:
        text: The text that the policy reads, but for the middle of one above `conversation.max_reply_tokens`.
        reward: The reward for having made the call, at the last token of its turn.
    """

    text: str
    reward: float = 0.0


class Tool(BoundPart):
    """Called by the policy: in a conversation after `create` and before `release`; one instance serves many of them.

    Methods are coroutines of the trainer's event loop, so they must await whatever takes time; plain code that may
    take long or hang belongs in a function under `rlkit.tool`, which runs in a process that is killed at its deadline.
    When a method raises, or takes longer than `timeout`, the policy reads an error message and the failure is counted.

    `name`, `description` and `parameters` (the JSON schema of the arguments, an object) are shown to the policy.
    Keyword arguments of a phase come from the row of the data: `tools: {name: {create: {...}, call: {...}}}`. A row
    without `tools` has all tools of the recipe.
    """

    name: str
    description: str
    parameters: JsonObject
    timeout: float = 30.0
    """Seconds for one call, from the start of the work."""
    concurrency: int | None = None
    """How many calls may run at once, over all conversations; None for any number."""

    async def create(self, state: State, **kwargs: object) -> None:
        """Prepare one conversation's state."""

    @abstractmethod
    async def call(self, arguments: JsonObject, state: State, **kwargs: object) -> ToolReply | str:
        """Run a call whose arguments satisfy the schema."""

    async def reward(self, state: State, **kwargs: object) -> float:
        """Return a reward for the use of the tool in the whole conversation, at its end."""
        return 0.0

    async def release(self, state: State, **kwargs: object) -> None:
        """Free what the conversation holds; always called once, however the conversation ended."""
