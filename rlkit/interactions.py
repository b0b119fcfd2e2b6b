"""Simulated users that come with rlkit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rlkit.base.errors import RecipeError, RolloutError
from rlkit.base.ranges import NonNegativeFloat, Repeats, Seconds
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.tool import State
from rlkit.ops.answers import equal, final_answer, reference_of
from rlkit.registry import close_parts
from rlkit.types import Message, Prompt

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

__all__ = ["InteractionRouter", "Retry"]


class Retry(Interaction):
    """Compares the final answer with the prompt's; a wrong one may be corrected.

    Args:
        tries: How often the policy may try again.
        text: The message after a wrong answer.
        penalty: Taken off the reward for each wrong answer.
    """

    def __init__(
        self,
        tries: Repeats = 1,
        text: str = "That is not right. Check your work and answer again.",
        penalty: NonNegativeFloat = 0.0,
    ) -> None:
        self.tries = tries
        self.text = text
        self.penalty = penalty

    def bind(self, runtime: Runtime) -> None:
        self._work = runtime.work

    async def start(self, prompt: Prompt, state: State) -> None:
        state["answer"] = reference_of(prompt.answer or "")
        state["left"] = self.tries

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        answer, _ = final_answer(after_thinking(messages[-1]["content"]))
        if answer is not None and state["answer"] is not None and await self._is_right(answer, state["answer"]):
            return Reply([], done=True)
        state["left"] -= 1
        return Reply([{"role": "user", "content": self.text}], done=state["left"] < 0, reward=-self.penalty)

    async def _is_right(self, answer: str, expected: str) -> bool:
        """Compare in a worker; an answer that cannot be compared is wrong, unless the reference cannot be either."""
        try:
            return bool(await self._work(_same, (answer, expected), self.timeout))
        except Exception:  # whatever the runtime raises for failed work; the next line raises its own error
            await self._work(_same, (expected, expected), self.timeout)
            return False


def _same(answers: tuple[str, str]) -> bool:
    return equal(*answers)


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
