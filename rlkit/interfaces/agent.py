"""The interface of agents: programs with a loop and tools of their own, which ask the policy for each turn."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

from rlkit.interfaces.content import described, pictures_of
from rlkit.interfaces.picture import Picture
from rlkit.interfaces.runtime import BoundPart
from rlkit.types import JsonObject, Message, Prompt


@dataclass(frozen=True)
class AgentTask:
    """What an agent has to do.

    Args:
        prompt: The prompt, with the columns of its row.
        folder: An empty folder of the rollout's own, which is removed once the rollout is scored.
        seed: The same for all samples of a prompt.
    """

    prompt: Prompt
    folder: Path
    seed: int

    @property
    def text(self) -> str:
        """The texts of the prompt's messages, with `[picture]` for each picture."""
        return "\n\n".join(str(described(message["content"])) for message in self.prompt.messages)

    @property
    def pictures(self) -> list[Picture]:
        """The pictures of the prompt's messages."""
        return pictures_of(self.prompt.messages)


class RoleClient(Protocol):
    """One role's conversation with the policy, in a session where it plays several."""

    reward: float | None
    """The role's reward, which the agent sets before it ends."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the policy's next message in this role; see `AgentClient.chat`."""


class AgentClient(Protocol):
    """How an agent reaches the policy: by an address, or in this process."""

    @property
    def url(self) -> str:
        """The gateway's address; `/v1` after it is the base URL of OpenAI's clients."""

    @property
    def key(self) -> str:
        """The API key, a secret of this rollout."""

    @property
    def model(self) -> str:
        """The name of the policy."""

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the policy's next message in the form of OpenAI's chat completions, without a connection.

        Raises:
            RlkitError: The request is refused; the message says why.
        """

    def role(self, name: str) -> RoleClient:
        """Return a new conversation in a role, with a reward and an advantage of its own.

        The samples of a role are compared within the rollout if it has several there, and otherwise with those of the
        same role in the other rollouts of the prompt. Special characters of the name become `_`.
        """


@dataclass(frozen=True)
class AgentResult:
    """How an agent ended.

    Args:
        status: Exit status: 0 if it ended well.
        output: The end of what it wrote.
        fields: Values of declared fields by row, by name; all samples of the rollout have them.
    """

    status: int = 0
    output: str = ""
    fields: Mapping[str, object] = field(default_factory=dict)


class Agent(BoundPart):
    """Does a prompt's task in as many requests to the policy as it likes; each rollout is one call of `run`.

    What the policy sampled is trained on token for token, and the reward is that of the rollout. `run` is a coroutine
    of the rollouts' event loop, so it must await whatever takes time. One instance serves many rollouts at once.
    """

    may_fill: ClassVar[Sequence[str]] = ("row",)
    timeout: float = 600.0
    """Seconds for one rollout; time in which the engine samples does not count."""
    keep: str | None = None
    """The folder to which the rollouts' folders are moved after they are scored; None removes them."""

    def refuses(self, prompt: Prompt) -> str | None:
        """Explain before a run why the agent cannot do a prompt's task; None if it may."""
        return None

    @abstractmethod
    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        """Do the task; cancelled at the deadline. An exception counts as a failure of the agent, which is scored."""
