"""A reward by the weighted criteria of each row."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import isfinite
from typing import TYPE_CHECKING, NamedTuple

from rlkit.base.errors import RecipeError, show
from rlkit.base.names import Name
from rlkit.base.ranges import Seconds
from rlkit.interfaces.reward import OnError, RewardManager, sum_counts
from rlkit.interfaces.rows import field_of
from rlkit.registry import close_parts
from rlkit.types import JsonObject, Prompt, Score, Trajectory
from rlkit_judges.client import JudgeClient
from rlkit_judges.prompts import TEMPLATE, JudgePrompt, answer_schema, check_template, response_of
from rlkit_judges.server import BudgetError, JudgeError, JudgeServer

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

ITEM = "{criterion: text, weight: number}, or {reward: name, weight: number}"


class Criterion(NamedTuple):
    """An item of a rubric.

    Args:
        weight: A negative one is a penalty.
        text: What the judge looks for; empty if a reward scores it.
        reward: Name of that reward; empty if the judge decides.
    """

    weight: float
    text: str
    reward: str


class RubricReward(RewardManager):
    """The weighted share of the criteria of its row that a completion satisfies, from 0 to 1.

    A row has a list of items `{criterion: text, weight: number}`, which a judge decides, all in one question for each
    completion, and `{reward: name, weight: number}`, which one of `rewards` scores, limited to 0 to 1. `points` is
    another name of `weight`, which is 1 by default. The reward is the sum of weight * score by the sum of the positive
    weights, limited to 0 to 1, so that items with a negative weight are penalties. An item whose reward has no opinion
    (None) is left out.

    The component `judged` is the share of the judged criteria that are met; each reward is a component of its name.

    Args:
        server: The judge's server; null if no row has criteria for a judge.
        column: Column of the data with the rubric; `a.b` is the field `b` inside `a`.
        rewards: Rewards by the names under which rows refer to them.
        template: Text with `{responses}` and any of `{criteria}`, `{question}` and `{reference}`.
        timeout: Seconds for the samples of one prompt, without the wait for a free slot of the server.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        server: JudgeServer | None = None,
        column: str = "rubric",
        rewards: dict[Name, RewardManager] | None = None,
        *,
        template: str = TEMPLATE,
        timeout: Seconds = 900.0,
        on_error: OnError = "drop",
    ) -> None:
        if server is None and not rewards:
            raise RecipeError("RubricReward has neither a server nor rewards, expected at least one of them")
        check_template("RubricReward", template)
        self.server = server
        self.column = column
        self.rewards = rewards or {}
        self.template = template
        self.timeout = timeout
        self.on_error = on_error
        limits = [r.concurrency for r in self.rewards.values() if r.concurrency is not None]
        self.concurrency = max(limits, default=None)

    @cached_property
    def _client(self) -> JudgeClient | None:
        return None if self.server is None else JudgeClient(self.server)

    def bind(self, runtime: Runtime) -> None:
        self.runtime = runtime
        if self.server is not None:
            self.server.require_usable()
        for reward in self.rewards.values():
            reward.bind(runtime)

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        close_parts(list(self.rewards.values()))

    def effect(self) -> str | None:
        return None if self.server is None else f"asks {self.server}"

    def counts(self) -> Mapping[str, float]:
        totals = sum_counts(self.rewards.values())
        if self._client is not None:
            totals.update(self._client.spending.counts)
        return totals

    def unscorable(self, prompt: Prompt) -> str | None:
        try:
            items = self._items(prompt)
        except ValueError as error:
            return str(error)
        named = [self.rewards[item.reward] for item in items if item.reward]
        return next(filter(None, (reward.unscorable(prompt) for reward in named)), None)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        if not trajectories:
            return []
        items = self._items(trajectories[0].prompt)
        names = list(dict.fromkeys(item.reward for item in items if item.reward))
        columns = await asyncio.gather(*(self.runtime.score(self.rewards[name], trajectories) for name in names))
        by_code = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)] or [
            {} for _ in trajectories
        ]
        scores = (self._score(t, items, code) for t, code in zip(trajectories, by_code, strict=True))
        return list(await asyncio.gather(*scores))

    async def _score(self, trajectory: Trajectory, items: Sequence[Criterion], by_code: Mapping[str, Score]) -> Score:
        """Return the score of a trajectory, given those of the rewards that its rubric names."""
        rewards: dict[str, float] = {}
        for name, score in by_code.items():
            if score.error is not None:
                return Score(None, error=f"reward {name} of the rubric: {score.error}")
            if score.reward is not None:
                rewards[name] = min(1.0, max(0.0, score.reward))
        items = [item for item in items if not item.reward or item.reward in rewards]
        best = sum(item.weight for item in items if item.weight > 0)
        if not best:
            return Score(None)
        texts = [item.text for item in items if not item.reward]
        try:
            verdicts = await self._ask(trajectory, texts) if texts else []
        except (BudgetError, JudgeError) as error:
            assert self._client is not None
            return self._client.score_without_answer(error)
        answers = iter(verdicts)
        points = sum(item.weight * (rewards[item.reward] if item.reward else next(answers)) for item in items)
        share = points / best
        judged = {"judged": sum(verdicts) / len(verdicts)} if verdicts else {}
        return Score(min(1.0, max(0.0, share)), {**rewards, **judged})

    async def _ask(self, trajectory: Trajectory, criteria: Sequence[str]) -> list[bool]:
        """Check whether a completion satisfies each criterion."""
        assert self._client is not None
        listed = "\n" + "\n".join(f"{number}. {text}" for number, text in enumerate(criteria, 1))
        prompt = JudgePrompt(trajectory.prompt, self.template, listed)
        task = f"Decide for each of the {len(criteria)} criteria, in their order, whether the response meets it."
        schema = answer_schema({"met": {"type": "array", "items": {"type": "boolean"}}})
        question = prompt.question([response_of(trajectory)], task, schema)
        return await self._client.ask(question, partial(_verdicts, len(criteria)))

    def _items(self, prompt: Prompt) -> list[Criterion]:
        """Return the rubric of a prompt.

        Raises:
            ValueError: It has none, or one that cannot be scored.
        """
        try:
            rubric = field_of(prompt.meta, self.column)
        except KeyError:
            raise ValueError(f"has no column {self.column!r} with a rubric") from None
        if isinstance(rubric, str | bytes) or not isinstance(rubric, Sequence):
            raise ValueError(f"has the rubric {show(rubric)}, expected a list of {ITEM}")
        items = [self._item(item) for item in rubric]
        if not any(item.weight > 0 for item in items):
            raise ValueError("has a rubric without a positive weight")
        return items

    def _item(self, item: object) -> Criterion:
        fields = item if isinstance(item, Mapping) else {}
        text, reward = (fields.get(name) or "" for name in ("criterion", "reward"))
        weight = next((fields[name] for name in ("weight", "points") if fields.get(name) is not None), 1.0)
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool) and isfinite(weight)
        if not is_number or not isinstance(text, str) or not isinstance(reward, str) or not (text or reward):
            raise ValueError(f"has the item {show(item)} in its rubric, expected {ITEM}")
        if reward and reward not in self.rewards:
            raise ValueError(f"names the reward {reward!r}, expected any of: {', '.join(self.rewards) or 'none'}")
        if not reward and self.server is None:
            raise ValueError(f"has a criterion for a judge, {show(text)}, but RubricReward has no server")
        return Criterion(float(weight), text, reward)


def _verdicts(count: int, answer: JsonObject) -> list[bool]:
    value = answer.get("met")
    if not isinstance(value, list) or len(value) != count or not all(isinstance(met, bool) for met in value):
        raise ValueError(f"it has met={show(value)}, expected a list of {count} booleans")
    return value
