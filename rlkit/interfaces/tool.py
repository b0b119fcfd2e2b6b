"""The interface of a tool: something that the policy may call while it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

State = dict[str, Any]
"""What a tool, an interaction or an environment keeps of one conversation; each starts with an empty one."""


class ToolReply(NamedTuple):
    """What a call answers.

    Args:
        text: What the policy reads.
        reward: The reward for having made the call, at the last token of its turn.
    """

    text: str
    reward: float = 0.0


class Tool(ABC):
    """Called by the policy, in one conversation after `create` and before `release`; many conversations share it.

    Methods are coroutines of the trainer's event loop, so they must await whatever takes time; plain code that may
    take long or hang belongs in a function under `rlkit.tool`, which runs in a process that is killed at its deadline.
    A method that raises, or takes longer than `timeout`, costs an error message to the policy and a count.

    `name`, `description` and `parameters` (the JSON schema of the arguments, an object) are what the policy is told.
    Keyword arguments of a phase come from the row of the data: `tools: {name: {create: {...}, call: {...}}}`.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    timeout: float = 30.0
    """Seconds for one call, from the start of the work."""
    concurrency: int | None = None
    """How many calls may run at once, over all conversations; None for any number."""

    def bind(self, runtime: Runtime) -> None:
        """Receive what exists only once the run does."""

    async def create(self, state: State, **kwargs: Any) -> None:
        """Prepare one conversation's state."""

    @abstractmethod
    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> ToolReply | str:
        """Answer a call whose arguments satisfy the schema."""

    async def reward(self, state: State, **kwargs: Any) -> float:
        """Return a reward for the use of the tool in the whole conversation, at its end."""
        return 0.0

    async def release(self, state: State, **kwargs: Any) -> None:
        """Free what the conversation holds; always called once, however the conversation ended."""

    def close(self) -> None:
        """Free what the tool itself holds; called once, at the end of the run."""
