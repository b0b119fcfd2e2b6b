"""A reward from a language model that judges."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import ceil
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from rlkit.base.errors import RecipeError, show
from rlkit.base.ranges import Count, FiniteFloat, NonNegativeInt, Seconds
from rlkit.base.tasks import run_concurrently
from rlkit.interfaces.reward import OnError, RewardManager
from rlkit.types import JsonObject, Score, Trajectory
from rlkit_judges.client import JudgeClient
from rlkit_judges.prompts import TEMPLATE, JudgePrompt, answer_schema, check_template, response_of
from rlkit_judges.server import BudgetError, JudgeError, JudgeServer

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

WIN = {"1": 1.0, "2": 0.0, "tie": 0.5}
"""What the first response of a pair earns, by the judge's answer."""


class JudgeReward(RewardManager):
    """The judgement of a language model, from 0 to 1.

    `absolute`: a score for each completion by itself, on the scale from `lowest` to `highest`, mapped to 0 to 1.
    `pairwise`: the share of comparisons with other samples of the prompt that a completion wins; a tie is half.
    `ranked`: all samples of the prompt in one question; the best is 1, the worst 0, the others evenly between.

    Equal completions are one response. The order of responses in a question is random, the same for the same texts and
    `seed`. In `pairwise` and `ranked`, a completion alone, as in validation, is compared with the row's answer; without
    an answer its score fails. If all responses are equal, each scores 0.5 without a call.

    The judge's texts and schema are those of `rlkit docs judges`. Pictures and thinking are not sent.

    Args:
        server: The server, with its limits and budget.
        criteria: What the judge looks for.
        mode: What is compared.
        lowest: The worst score, with `absolute`.
        highest: The best score, with `absolute`.
        opponents: Samples with which each one is compared, rounded up to an even number, with `pairwise`; null for all.
        both_orders: Whether to ask for each pair in both orders, with `pairwise`.
        template: Text with `{responses}` and any of `{criteria}`, `{question}` and `{reference}`.
        seed: Seed of the order of responses.
        timeout: Seconds for the samples of one prompt, without the wait for a free slot of the server.
        on_error: What happens to a group with a failed score.
    """

    components = ()

    def __init__(
        self,
        server: JudgeServer,
        criteria: str = "Is the response correct, complete and helpful?",
        mode: Literal["absolute", "pairwise", "ranked"] = "absolute",
        *,
        lowest: FiniteFloat = 0.0,
        highest: FiniteFloat = 10.0,
        opponents: Count | None = 4,
        both_orders: bool = False,
        template: str = TEMPLATE,
        seed: NonNegativeInt = 0,
        timeout: Seconds = 900.0,
        on_error: OnError = "drop",
    ) -> None:
        if not lowest < highest:
            raise RecipeError(f"JudgeReward has lowest={lowest:g} and highest={highest:g}, expected lowest < highest")
        check_template("JudgeReward", template)
        self.server = server
        self.criteria = criteria
        self.mode = mode
        self.lowest = lowest
        self.highest = highest
        self.opponents = opponents
        self.both_orders = both_orders
        self.template = template
        self.seed = seed
        self.timeout = timeout
        self.on_error = on_error

    @cached_property
    def _client(self) -> JudgeClient:
        return JudgeClient(self.server)

    def bind(self, runtime: Runtime) -> None:
        self.server.require_usable()

    def close(self) -> None:
        self._client.close()

    def effect(self) -> str:
        return f"asks {self.server}"

    def counts(self) -> Mapping[str, float]:
        return self._client.spending.counts

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        if not trajectories:
            return []
        prompt = JudgePrompt(trajectories[0].prompt, self.template, self.criteria)
        texts = [response_of(trajectory) for trajectory in trajectories]
        if self.mode == "absolute":
            return list(await asyncio.gather(*(self._rate(prompt, text) for text in texts)))
        reference = trajectories[0].prompt.answer
        responses = sorted({*texts, *([reference] if len(texts) == 1 and reference is not None else [])})
        if len(texts) == 1 and reference is None:
            problem = f"mode {self.mode} compares samples, and this completion is alone and its row has no answer"
            return [Score(None, error=f"{problem}; set validation.samples, or choose mode absolute")]
        if len(responses) == 1:
            return [Score(0.5) for _ in texts]
        compare = self._compare if self.mode == "pairwise" else self._rank
        prompt.order(self.seed, responses).shuffle(responses)
        try:
            by_text = dict(zip(responses, await compare(prompt, responses), strict=True))
        except (BudgetError, JudgeError) as error:
            return [self._client.score_without_answer(error) for _ in texts]
        return [Score(by_text[text]) for text in texts]

    async def _rate(self, prompt: JudgePrompt, text: str) -> Score:
        low, high = self.lowest, self.highest
        task = f"Score the response from {low:g} (worst) to {high:g} (best)."
        question = prompt.question([text], task, answer_schema({"score": {"type": "number"}}))
        try:
            rating = await self._client.ask(question, partial(_rating, low, high))
        except (BudgetError, JudgeError) as error:
            return self._client.score_without_answer(error)
        return Score((rating - low) / (high - low))

    async def _compare(self, prompt: JudgePrompt, responses: Sequence[str]) -> list[float]:
        """Return the share of its comparisons that each response wins."""
        schema = answer_schema({"better": {"type": "string", "enum": list(WIN)}})
        task = 'Decide which response is better: "1", "2", or "tie".'
        pairs = _pairs(len(responses), self.opponents)
        pairs += [(second, first) for first, second in pairs] if self.both_orders else []
        questions = [prompt.question([responses[i], responses[j]], task, schema) for i, j in pairs]
        wins = await run_concurrently(*(self._client.ask(question, _winner) for question in questions))
        shares: list[list[float]] = [[] for _ in responses]
        for (first, second), win in zip(pairs, wins, strict=True):
            shares[first].append(win)
            shares[second].append(1 - win)
        return [fmean(results) for results in shares]

    async def _rank(self, prompt: JudgePrompt, responses: Sequence[str]) -> list[float]:
        """Return 1 for the best response, 0 for the worst, and the others evenly between."""
        schema = answer_schema({"ranking": {"type": "array", "items": {"type": "integer"}}})
        task = f"Rank the responses: list all numbers from 1 to {len(responses)}, the best response first."
        question = prompt.question(responses, task, schema)
        ranking = await self._client.ask(question, partial(_ranking, len(responses)))
        return [1 - ranking.index(number) / (len(responses) - 1) for number in range(1, len(responses) + 1)]


def _pairs(count: int, opponents: int | None) -> list[tuple[int, int]]:
    """Return pairs of `count` responses, in which each comes first about as often as second.

    Each response is compared with its nearest neighbours on a ring.
    """
    farthest = count // 2 if opponents is None else min(count // 2, ceil(opponents / 2))
    steps = [(i, distance) for distance in range(1, farthest + 1) for i in range(count)]
    return [(i, (i + distance) % count) for i, distance in steps if 2 * distance < count or i < distance]


def _rating(low: float, high: float, answer: JsonObject) -> float:
    value = answer.get("score")
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"it has the score {show(value)}, expected a number from {low:g} to {high:g}")
    return float(value)


def _winner(answer: JsonObject) -> float:
    """Return 1 if the first response is better, 0 if the second one is."""
    value = answer.get("better")
    if not isinstance(value, str) or value not in WIN:
        raise ValueError(f"it has better={show(value)}, expected any of: {', '.join(WIN)}")
    return WIN[value]


def _ranking(count: int, answer: JsonObject) -> list[int]:
    value = answer.get("ranking")
    if not isinstance(value, list) or not all(isinstance(number, int) for number in value):
        raise ValueError(f"it has the ranking {show(value)}, expected a list of integers")
    if sorted(value) != list(range(1, count + 1)):
        raise ValueError(f"it has the ranking {show(value)}, expected each number from 1 to {count} once")
    return value
