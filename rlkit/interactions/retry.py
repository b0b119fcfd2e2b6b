"""A user who says whether the answer is right, and lets the policy try again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit.ops.answers import equal, final_answer
from rlkit.ranges import NonNegativeFloat, Repeats
from rlkit.roles.interaction import Interaction, Reply
from rlkit.roles.tool import State
from rlkit.types import Message, Prompt

if TYPE_CHECKING:
    from rlkit.roles.runtime import Runtime


class Retry(Interaction):
    """Compares the final answer with the prompt's; a wrong one may be mended.

    Args:
        tries: How often the policy may try again.
        text: What it is told then.
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
        state["answer"] = final_answer(prompt.answer or "")[0]
        state["left"] = self.tries

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        given, _ = final_answer(messages[-1]["content"])
        expected = state["answer"]
        if given is not None and expected is not None and await self._work(_same, (given, expected), self.timeout):
            return Reply([], done=True)
        state["left"] -= 1
        return Reply([{"role": "user", "content": self.text}], done=state["left"] < 0, reward=-self.penalty)


def _same(answers: tuple[str, str]) -> bool:
    return equal(*answers)
