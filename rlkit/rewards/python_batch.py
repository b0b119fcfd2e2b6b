"""Rewards from a Python function that sees all samples of a prompt at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlkit.base.functions import load_once, require_function
from rlkit.base.ranges import Count, Seconds
from rlkit.interfaces.reward import OnError, RewardManager, as_score
from rlkit.rewards.python_call import Completions, Grader
from rlkit.types import JsonObject, Score, Trajectory

if TYPE_CHECKING:
    from rlkit.interfaces.runtime import Runtime

Call = tuple[str, Completions, list[Trajectory]]
"""A function's name, the form of its texts, and the batch."""


class BatchReward(RewardManager):
    """Calls a function, sync or async, with lists over the samples of a prompt, in a worker process.

    A batch is the group of a prompt, `rollout.group_size` samples without failed conversations, scored as soon as its
    last sample ends: so a function may compare samples, but never those of different prompts. In validation a batch
    may be a single completion.

    The function takes any of these lists by name: `data_sources`, `solution_strs`, `ground_truths` and `extra_infos`,
    as verl's batch reward manager passes them; `prompts`, `completions`, `completion_ids`, `answer` and the columns of
    the data, as TRL passes them. It returns a list with a number for each sample, None for no opinion, or a mapping of
    components with the reward under `reward` (under `score` if the function takes `solution_strs`).

    Args:
        function: `file.py:name` or `package.module:name`.
        allow_code: Must be true, since the recipe runs the function's code.
        completions: The elements of `completions` and `prompts`: chat messages or texts.
        timeout: Seconds for one batch, from the start of the work.
        concurrency: Maximum concurrent calls; null for the number of CPUs.
        on_error: What happens to a group with a failed score.
    """

    def __init__(
        self,
        function: str,
        allow_code: bool = False,
        *,
        completions: Completions = "messages",
        timeout: Seconds = 60.0,
        concurrency: Count | None = None,
        on_error: OnError = "drop",
    ) -> None:
        self.allow_code = allow_code
        require_function("BatchReward", function, self.allow_code)
        self.function = function
        self.completions = completions
        self.timeout = timeout
        self.concurrency = concurrency
        self.on_error = on_error

    def effect(self) -> str:
        return f"runs {self.function}"

    def bind(self, runtime: Runtime) -> None:
        self._work = runtime.work

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        call: Call = (self.function, self.completions, list(trajectories))
        return [Score(**fields) for fields in await self._work(_grade, call, self.timeout)]


def _grade(call: Call) -> list[JsonObject]:
    """Grade a batch in a worker; return the fields of the scores, since a worker returns only data."""
    function, completions, trajectories = call
    scores = Grader(function, load_once(function), completions).grade_batch(trajectories)
    return [vars(as_score(score, function)) for score in scores]
