"""The interface of tools, which the policy may call during a conversation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from rlkit.interfaces.runtime import BoundPart
from rlkit.types import JsonObject

Content = str | list[JsonObject]
"""What the policy reads: a text, or parts `{type: text, text: ...}` and, for a model that reads pictures,
`{type: image, image: ...}` with the bytes of a picture, an image of Pillow or a data URI."""

State = dict[str, Any]
"""The state of a tool, an interaction or an environment in one conversation; empty at its start."""


class ToolReply(NamedTuple):
    """The result of a call.

    Args:
        text: What the policy reads; its middle is left out above `conversation.max_reply_tokens`.
        reward: Reward for the call, credited to the last token of its turn.
        fields: Values of declared fields, by name: of the turn that made the call, or of the row.
        metrics: Numbers by name; the step logs their means as `tool/NAME/METRIC`.
    """

    text: Content
    reward: float = 0.0
    fields: Mapping[str, object] = {}
    metrics: Mapping[str, float] = {}


class Tool(BoundPart):
    """A tool that the policy may call in a conversation, after `create` and before `release`.

    One instance serves many conversations. Methods are coroutines of the trainer's event loop, so they must await
    everything that takes time. Plain code that may take long or hang belongs in a function under `rlkit.tool`, which
    runs in a process that is killed at its deadline. If a method raises or exceeds `timeout`, the policy reads an error
    message, and the failure is counted.

    The policy reads `name`, `description` and `parameters`, the JSON schema of the arguments, an object. Keyword
    arguments of a phase come from the row: `tools: {name: {create: {...}, call: {...}}}`. A row without `tools` may use
    all tools of the recipe.
    """

    may_fill: ClassVar[Sequence[str]] = ("turn", "row")
    name: str
    description: str
    parameters: JsonObject
    timeout: float = 30.0
    """Seconds for one call, from the start of the work."""
    concurrency: int | None = None
    """Most calls at once, over all conversations; None for any number."""

    async def create(self, state: State, **kwargs: object) -> None:
        """Prepare one conversation's state."""

    @abstractmethod
    async def call(self, arguments: JsonObject, state: State, **kwargs: object) -> ToolReply | Content:
        """Run a call whose arguments satisfy the schema."""

    async def reward(self, state: State, **kwargs: object) -> float:
        """Return a reward for the use of the tool in the whole conversation, at its end."""
        return 0.0

    async def release(self, state: State, **kwargs: object) -> None:
        """Free what the conversation holds; always called once, however the conversation ended."""
