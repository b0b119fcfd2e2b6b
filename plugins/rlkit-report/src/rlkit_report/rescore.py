"""Saved rollouts scored again, with a recipe's reward and without its policy."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

from rlkit.api.policy import Bound, ChatTemplate, bound_without_policy
from rlkit.base.errors import RolloutError
from rlkit.base.tasks import run_concurrently
from rlkit.recipe import Recipe
from rlkit.records.rows import SavedRow, read_rows
from rlkit.types import Message, Score


@contextmanager
def rescoring(recipe: Recipe) -> Iterator[Rescorer]:
    """Bind a recipe's reward, and close it at the end.

    Raises:
        RecipeError: The reward needs the policy as soon as it is bound.
        PartError: The reward raised.
    """
    with bound_without_policy(recipe, recipe.scorer) as bound:
        yield Rescorer(recipe, bound)


class Rescorer:
    """Calls a recipe's reward on saved rollouts, with as many prompts at once as a step has.

    Args:
        recipe: Checked; its policy is not loaded.
        bound: What the reward is bound to.
    """

    def __init__(self, recipe: Recipe, bound: Bound) -> None:
        self.recipe = recipe
        self.bound = bound

    def score(self, path: Path) -> Iterator[list[SavedRow]]:
        """Yield the groups of a file in its order, with the new scores of all rows but of failed conversations."""
        groups: dict[tuple[str, ...], list[SavedRow]] = defaultdict(list)
        for row in read_rows(path, self._tokenize):
            groups[row.group].append(row)
        scored = [[row for row in rows if not row.failed] for rows in groups.values()]
        scores_of = self.bound.loop.run(self._score(scored))
        for rows, group_rows, scores in zip(groups.values(), scored, scores_of, strict=True):
            for row, new in zip(group_rows, scores, strict=True):
                row.trajectory.score = new
            yield rows

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(
            self.bound.runtime.tokenizer, self.bound.runtime.stop_ids, (), self.recipe.model.chat_template_kwargs
        )

    async def _score(self, groups: Sequence[Sequence[SavedRow]]) -> list[list[Score]]:
        at_once = asyncio.Semaphore(self.recipe.train.prompts_per_step)

        async def score_group(rows: Sequence[SavedRow]) -> list[Score]:
            async with at_once:
                try:
                    trajectories = [row.trajectory for row in rows]
                    return await self.bound.runtime.score(self.recipe.scorer, trajectories) if rows else []
                except RolloutError as error:  # of a reward whose on_error is raise
                    return [Score(None, error=str(error))] * len(rows)

        return await run_concurrently(*map(score_group, groups))

    def _tokenize(self, messages: list[Message], text: str) -> tuple[list[int], list[int]]:
        template = self._template
        return template.start(messages), template.codec.encode(text, template.prompt_end) + template.turn_end
