"""The tool of verl that reports the score of an answer."""

from __future__ import annotations

from rlkit_math.answers import equal, final_answer

from rlkit.base.ranges import Seconds
from rlkit.interfaces.runtime import Runtime
from rlkit.interfaces.tool import State, Tool, ToolReply


class AnswerScore(Tool):
    """Compares an answer with the row's and reports the score, 1.0 or 0.0, as verl's Gsm8kTool does.

    The reference is the row's `tools: {NAME: {create: {ground_truth: ...}}}`, which the task `Verl` reads from verl's
    `tools_kwargs`. The call itself earns nothing: the recipe's reward scores the conversation.

    Args:
        description: What the policy reads about the tool.
        answer: What the policy reads about the argument `answer`.
        timeout: Seconds for one call.
    """

    name = "answer_score"

    def __init__(
        self,
        description: str = "Reports whether an answer is right: 1.0, or 0.0.",
        answer: str = "The final answer.",
        timeout: Seconds = 30.0,
    ) -> None:
        self.description = description
        self.answer = answer
        self.timeout = timeout
        self.parameters = {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": answer}},
            "required": ["answer"],
        }

    def bind(self, runtime: Runtime) -> None:
        self._work = runtime.work

    async def create(self, state: State, ground_truth: object = None, **kwargs: object) -> None:
        if ground_truth is None:
            raise ValueError("AnswerScore needs a ground_truth in the row's create_kwargs, and there is none")
        state["ground_truth"] = str(ground_truth)

    async def call(self, arguments: dict[str, object], state: State, **kwargs: object) -> ToolReply:
        text = str(arguments["answer"])
        answer = text if text.startswith("#### ") else f"#### {text}"
        is_right = await self._work(_is_right, (answer, state["ground_truth"]), self.timeout)
        return ToolReply(f"Current parsed answer={text!r} reward={float(bool(is_right))}")


def _is_right(answers: tuple[str, str]) -> bool:
    answer_text, expected = answers
    answer, _ = final_answer(answer_text)
    return answer is not None and equal(answer, expected)
