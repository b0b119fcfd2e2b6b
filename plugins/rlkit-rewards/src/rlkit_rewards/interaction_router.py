"""A simulated user that chooses another by the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError, RolloutError
from rlkit.base.ranges import Seconds
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.tool import State
from rlkit.registry import close_parts
from rlkit.types import Message, Prompt

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


class InteractionRouter(Interaction):
    """Replies with the interaction that the row names: `interaction: {name: ...}` in the prompt's `meta`.

    Args:
        interactions: Interactions by name.
        default: The name for rows without one; null leaves them without replies.
        timeout: Seconds for one reply.
    """

    def __init__(
        self, interactions: dict[str, Interaction], default: str | None = None, *, timeout: Seconds = 30.0
    ) -> None:
        if not interactions or (default is not None and default not in interactions):
            raise RecipeError(
                f"InteractionRouter has default={default!r}, expected a name among: {', '.join(interactions) or 'none'}"
            )
        self.interactions = interactions
        self.default = default
        self.timeout = timeout

    def bind(self, runtime: Runtime) -> None:
        for interaction in self.interactions.values():
            interaction.bind(runtime)

    def close(self) -> None:
        close_parts(list(self.interactions.values()))

    async def start(self, prompt: Prompt, state: State) -> None:
        choice = prompt.meta.get("interaction")
        name = choice.get("name") if isinstance(choice, Mapping) else None
        state["name"], state["inner"] = self.default if name is None else str(name), {}
        if state["name"] is None:
            return
        if state["name"] not in self.interactions:
            names = ", ".join(self.interactions)
            state["name"], unknown = None, state["name"]
            raise RolloutError(f"the row names the interaction {unknown!r}; there are: {names}")
        await self.interactions[state["name"]].start(prompt, state["inner"])

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        if state["name"] is None:
            return Reply([], done=True)
        return await self.interactions[state["name"]].reply(messages, state["inner"])

    async def finish(self, state: State) -> None:
        if state.get("name") is not None:
            await self.interactions[state["name"]].finish(state["inner"])
