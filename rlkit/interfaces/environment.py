"""The interface of environments, which map the policy's actions to observations, such as text games."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from rlkit.interfaces.runtime import BoundPart
from rlkit.interfaces.tool import Content, State
from rlkit.types import Prompt


class Observation(NamedTuple):
    """The result of an action.

    Args:
        text: What the policy reads; its middle is left out above `conversation.max_reply_tokens`.
        reward: Reward for the action, credited to the last token of its turn.
        done: Whether the episode is over.
        fields: Values of declared fields, by name: of the turn that was the action, or of the row.
        metrics: Numbers by name; the step logs their means as `environment/METRIC`.
    """

    text: Content
    reward: float = 0.0
    done: bool = False
    fields: Mapping[str, object] = {}
    metrics: Mapping[str, float] = {}


class Environment(BoundPart):
    """Plays one episode in each conversation: observations are a user's messages, the policy's turns are actions.

    All samples of a prompt have the same seed and therefore play the same game. Methods are coroutines of the trainer's
    event loop. A method that raises or exceeds `timeout` ends its conversation with an error.
    """

    may_fill: ClassVar[Sequence[str]] = ("turn", "row")
    timeout: float = 30.0
    """Seconds for one step."""

    @abstractmethod
    async def reset(self, prompt: Prompt, seed: int, state: State) -> Content:
        """Start an episode in an empty state; return the first observation, which follows the prompt's messages."""

    @abstractmethod
    async def step(self, action: str, state: State) -> Observation:
        """Return the observation that follows the policy's turn.

        If the chat template begins the policy's thinking, the turn begins with the template's opening, such as
        `<think>`: `rlkit.interfaces.parser.after_thinking` removes thoughts.
        """

    async def finish(self, state: State) -> None:
        """Free what the episode holds; always called once."""
