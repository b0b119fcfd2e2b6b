"""verl's tool that reports the score of an answer."""

from __future__ import annotations

import asyncio

import pytest
from rlkit_convert import AnswerScore


class Worker:
    """A runtime that works at once."""

    async def work(self, function: object, arguments: object, timeout: float) -> object:
        return function(arguments)  # type: ignore[operator]


def reply(answer: str, truth: object) -> str:
    tool = AnswerScore()
    tool.bind(Worker())  # type: ignore[arg-type]
    state: dict[str, object] = {}

    async def play() -> str:
        await tool.create(state, ground_truth=truth)
        return str((await tool.call({"answer": answer}, state)).text)

    return asyncio.run(play())


@pytest.mark.parametrize(("answer", "score"), [("72", 1.0), ("#### 72", 1.0), ("72.0", 1.0), ("73", 0.0), ("", 0.0)])
def test_the_reply_is_that_of_verls_tool(answer: str, score: float) -> None:
    assert reply(answer, "72") == f"Current parsed answer={answer!r} reward={score}"


def test_a_row_without_a_ground_truth_is_refused() -> None:
    with pytest.raises(ValueError, match="needs a ground_truth"):
        reply("72", None)
