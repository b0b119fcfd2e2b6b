"""The interface of interactions: simulated users that reply to the policy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

from rlkit.interfaces.runtime import BoundPart
from rlkit.interfaces.tool import State
from rlkit.types import Message, Prompt


class Reply(NamedTuple):
    """The user's reply to a turn.

    Args:
        messages: Chat messages for the policy; an empty list ends the conversation.
        done: Whether the conversation is over.
        reward: Reward for the policy's turn.
        fields: Values of declared fields, by name: of the policy's turn, or of the row.
        metrics: Numbers by name; the step logs their means as `interaction/METRIC`.
    """

    messages: Sequence[Message]
    done: bool
    reward: float = 0.0
    fields: Mapping[str, object] = {}
    metrics: Mapping[str, float] = {}


class Interaction(BoundPart):
    """Replies to the policy's turns, to train on feedback. One instance serves many conversations.

    Methods are coroutines of the trainer's event loop. A method that raises or exceeds `timeout` ends its conversation
    with an error.
    """

    may_fill: ClassVar[Sequence[str]] = ("turn", "row")
    timeout: float = 30.0
    """Seconds for one reply."""

    async def start(self, prompt: Prompt, state: State) -> None:
        """Prepare one conversation's state."""

    @abstractmethod
    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        """Reply to the last of the messages, which is the policy's.

        If the chat template begins the policy's thinking, its messages begin with the template's opening, such as
        `<think>`: `rlkit.interfaces.parser.after_thinking` removes thoughts.
        """

    async def finish(self, state: State) -> None:
        """Free what the conversation holds; always called once."""
