"""What a task provides: prompts of chat messages, and completions that were recorded for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlkit.base.names import source_name

JsonObject = dict[str, Any]
"""A JSON object: values are None, booleans, numbers, texts, lists and objects."""
Tools = Sequence[str | JsonObject]
"""Tools of a conversation: names of the recipe's, or schemas `{"type": "function", "function": {"name": ...}}`."""
Row = Mapping[str, Any]
"""A row of a data set, by column."""
Message = JsonObject
"""A chat message: `role`, `content` and other keys that the chat template reads.

The content is a text, or a list of typed parts: `{"type": "text", "text": str}` and, for models that read pictures,
`{"type": "image", "image": rlkit.interfaces.picture.Picture}`.
"""


@dataclass
class RecordedAnswer:
    """A recorded completion of a prompt, on which `rollout.engine: Recorded` trains.

    Args:
        messages: The messages after the prompt. The first and the last are turns of the policy (`assistant`); turns of
            tools and users may be between them. A turn with the key `trained` that is False is context.
        reward: The reward; it ranks the recorded completions of a prompt.
        turn_rewards: Additional rewards, one for each turn of the policy; empty for none.
    """

    messages: list[Message]
    reward: float = 0.0
    turn_rewards: list[float] = field(default_factory=list)


@dataclass
class Prompt:
    """A prompt: what the policy reads, and what the reward needs to grade completions.

    Args:
        id: Name in logs and error messages. Random numbers derive from it, so it must not change between runs.
        messages: Chat messages that the template renders, with at least `role` and `content`.
        answer: The reference answer, if there is one; the policy never sees it.
        meta: The other columns of the row: `data_source` for `Router`, `tools` for the arguments of tools, and what a
            reward, an interaction or an environment reads.
        tools: Names of the recipe's tools, or schemas that the template shows instead; None for all of the recipe's.
        source: Name in `validation.tasks`, by which validation shows metrics apart; None for `data_source`.
        recorded: Recorded completions, the best first. Without messages before them they are plain texts.
        normalised: What the task normalised in the row's messages and tools, for `rlkit data show`.
    """

    id: str
    messages: list[Message]
    answer: str | None = None
    meta: Row = field(default_factory=dict)
    tools: list[str | JsonObject] | None = None
    source: str | None = None
    recorded: list[RecordedAnswer] = field(default_factory=list)
    normalised: list[str] = field(default_factory=list)

    @property
    def tool_names(self) -> list[str] | None:
        """The names of the tools; None for all of the recipe's."""
        tools = self.tools
        return None if tools is None else [t if isinstance(t, str) else t["function"]["name"] for t in tools]

    @property
    def source_name(self) -> str:
        """The `source`, or else the `data_source` of the meta data, as metrics name it; empty without either."""
        return source_name(str(self.source or self.meta.get("data_source") or ""))
