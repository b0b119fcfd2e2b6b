"""The interface of an interaction: a simulated user who answers the policy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rlkit.interfaces.tool import State
from rlkit.types import Message, Prompt

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class Reply(NamedTuple):
    """What the user says to a turn.

    Args:
        messages: What the policy is told, as chat messages; none end the conversation.
        done: Whether the conversation is over.
        reward: The reward of the policy's turn.
    """

    messages: Sequence[Message]
    done: bool
    reward: float = 0.0


class Interaction(ABC):
    """Answers the policy's turns, so that a policy can be trained on feedback; many conversations share it.

    Methods are coroutines of the trainer's event loop. One that raises or takes longer than `timeout` ends its
    conversation with an error.
    """

    timeout: float = 30.0
    """Seconds for one reply."""

    def bind(self, runtime: Runtime) -> None:
        """Receive what exists only once the run does."""

    async def start(self, prompt: Prompt, state: State) -> None:
        """Prepare one conversation's state."""

    @abstractmethod
    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        """Answer the last of the messages, which is the policy's."""

    async def finish(self, state: State) -> None:
        """Free what the conversation holds; always called once."""
