"""The interface of an environment: a text game, or anything else that answers actions with observations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, NamedTuple

from rlkit.interfaces.tool import State
from rlkit.types import Prompt

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class Observation(NamedTuple):
    """What an action leads to.

    Args:
        text: What the policy reads.
        reward: The reward of the action, at the last token of its turn.
        done: Whether the episode is over.
    """

    text: str
    reward: float = 0.0
    done: bool = False


class Environment(ABC):
    """Plays one episode a conversation: an observation is a user's message, the policy's turn is the action.

    All samples of a prompt get the same seed, so that they play the same game. Methods are coroutines of the
    trainer's event loop. One that raises or takes longer than `timeout` ends its conversation with an error.
    """

    timeout: float = 30.0
    """Seconds for one step."""

    def bind(self, runtime: Runtime) -> None:
        """Receive what exists only once the run does."""

    @abstractmethod
    async def reset(self, prompt: Prompt, seed: int, state: State) -> str:
        """Begin an episode in an empty state; give the first observation, which follows the prompt's messages."""

    @abstractmethod
    async def step(self, action: str, state: State) -> Observation:
        """Answer the policy's turn."""

    async def close(self, state: State) -> None:
        """Free what the episode holds; always called once."""
