"""Scoring saved rollouts as a run scores its own: in workers, with deadlines, without the policy."""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import TracebackType

from rlkit.cli.reward.compare import RescoredGroup
from rlkit.distributed.offload import use_device
from rlkit.errors import RecipeError, RolloutError
from rlkit.recipe import Recipe
from rlkit.registry import calling, close_parts
from rlkit.rollout.loop import EventLoop
from rlkit.rollout.scoring import score
from rlkit.rollout.tasks import run_concurrently
from rlkit.rollout.template import ChatTemplate
from rlkit.rollout.workers import Workers
from rlkit.run.rows import SavedRow, read_rows
from rlkit.text import part_name
from rlkit.train.runtime import NoPolicyError, RewardRuntime
from rlkit.train.setup import fabric_for
from rlkit.types import Message, Score


class Rescorer:
    """Calls a recipe's reward on saved rollouts, with as many prompts at once as a step has.

    Args:
        recipe: Checked; its policy is not loaded.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        fabric = fabric_for(recipe)
        self._workers = Workers(recipe.reward.concurrency or min(4, os.cpu_count() or 1))
        self._loop = EventLoop(partial(use_device, fabric.device))
        self._runtime = RewardRuntime(recipe, fabric, self._workers)

    def __enter__(self) -> Rescorer:
        try:
            with calling(self.recipe.reward, "bind"):
                self.recipe.reward.bind(self._runtime)
        except NoPolicyError as error:
            self._close()
            raise RecipeError(
                f"reward {part_name(self.recipe.reward)} asks for {error}, the policy of a run, which is not there "
                "where saved rollouts are scored; choose another reward"
            ) from error
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def score(self, path: Path) -> Iterator[RescoredGroup]:
        """Yield the groups of a file in its order, with the new scores of all rows but of failed conversations."""
        groups: dict[tuple[str, ...], list[SavedRow]] = defaultdict(list)
        for row in read_rows(path, self._tokenize):
            groups[row.group].append(row)
        given = [[row for row in rows if not row.failed] for rows in groups.values()]
        found = self._loop.run(self._score(given))
        for rows, known, scores in zip(groups.values(), given, found, strict=True):
            for row, new in zip(known, scores, strict=True):
                row.trajectory.score = new
            yield RescoredGroup(rows)

    async def _score(self, groups: Sequence[Sequence[SavedRow]]) -> list[list[Score]]:
        at_once = asyncio.Semaphore(self.recipe.train.prompts_per_step)

        async def score_group(rows: Sequence[SavedRow]) -> list[Score]:
            async with at_once:
                try:
                    trajectories = [row.trajectory for row in rows]
                    return await score(self.recipe.reward, trajectories, self._workers) if rows else []
                except RolloutError as error:  # of a reward whose on_error is raise
                    return [Score(None, error=str(error))] * len(rows)

        return await run_concurrently(*map(score_group, groups))

    def _tokenize(self, messages: list[Message], text: str) -> tuple[list[int], list[int]]:
        runtime = self._runtime
        template = ChatTemplate(runtime.tokenizer, runtime.stop_ids)
        end = sorted(runtime.stop_ids)[:1]
        return template.start(messages), runtime.tokenizer.encode(text, add_special_tokens=False) + end

    def _close(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._loop.close)
            stack.callback(self._workers.close)
            stack.callback(self._loop.run, self._close_parts())

    async def _close_parts(self) -> None:
        close_parts([self.recipe.reward])
