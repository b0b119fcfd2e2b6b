"""A simulated user who lets the policy correct a wrong answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit.base.ranges import NonNegativeFloat, Repeats
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.parser import after_thinking
from rlkit.interfaces.tool import State
from rlkit.types import Message, Prompt
from rlkit_math.answers import equal, final_answer, reference_of

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime


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
        expected = state["answer"]
        answer, _ = final_answer(after_thinking(messages[-1]["content"]), expected or "")
        if answer is not None and expected is not None and await self._is_right(answer, expected):
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
