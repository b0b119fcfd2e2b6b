"""The rollouts of a step as a run folder has them, instead of sampling."""

from __future__ import annotations

from pathlib import Path

from rlkit.base.errors import RecipeError
from rlkit.data.data import Data
from rlkit.ops.routes import ROUTES
from rlkit.recipe import Recipe
from rlkit.records.folder import of_rank
from rlkit.records.lines import step_metrics
from rlkit.records.rows import SavedRow, read_rows
from rlkit.rollout.service import RolloutService
from rlkit.train.metrics import Meter
from rlkit.train.rollouts import Rollouts, share_groups
from rlkit.types import Trajectory

SAMPLES = "rollout/samples"
"""The metric that counts a step's trajectories."""


class KeptRollouts:
    """Obtains steps' rollouts from a run folder, which must have all of them.

    Args:
        run: The run folder.
    """

    def __init__(self, run: Path) -> None:
        self.run = run
        self.samples = {line["step"]: int(line[SAMPLES]) for line in step_metrics(run) if SAMPLES in line}

    def __call__(self, data: Data, service: RolloutService, number: int, meter: Meter) -> Rollouts:
        """Return the rollouts of a step, scored.

        Raises:
            RecipeError: The file of this rank cannot be read, or the run has not kept all of the step's trajectories,
                or not their number.
        """
        if number not in self.samples:
            raise RecipeError(
                f"{self.run / 'metrics.jsonl'} has no {SAMPLES} for step {number}, with which its rollouts are compared"
            )
        data.prompts(number)  # the order of prompts is a state, which goes on
        ranks, filtered = service.ranks, service.recipe.rollout.filter is not None
        vocabulary = service.actor.policy.config.get_text_config().vocab_size
        trajectories = self._read(number, ranks.fabric.global_rank, vocabulary, service.recipe)
        new = [t for t in trajectories if "again" not in t.credit]
        counts = ranks.gather_dp(len(new))
        if sum(counts) != self.samples[number]:
            raise RecipeError(
                f"{self.run} has kept {sum(counts)} of the {self.samples[number]} trajectories of step {number} on "
                f"{ranks.count} rank{'s' * (ranks.count > 1)}; step 1 and the steps after a checkpoint are kept "
                "complete: learn from one of these, leave out --phase learn to sample again, or train with "
                "log.rollouts.limit: null and log.rollouts.every: 1"
            )
        rollouts = Rollouts(new)
        rollouts.sampled = [t for t in trajectories if t.error is None and ("advantages" in t.credit or not filtered)]
        rewarded = [t for t in trajectories if "greedy_reward" in t.credit]
        rollouts.greedy = {t.group: float(t.credit["greedy_reward"]) for t in rewarded} or None
        return share_groups(rollouts, ranks, meter)

    def _read(self, number: int, rank: int, vocabulary: int, recipe: Recipe) -> list[Trajectory]:
        trajectories = []
        for row in read_rows(self.run / "rollouts" / f"{of_rank(f'step-{number:05d}', rank)}.jsonl.gz"):
            samples = row.trajectory.samples
            if not all(0 <= token < vocabulary for sample in samples for token in sample.tokens):
                raise RecipeError(
                    f"{row.location} has token ids that the policy has not, expected 0 to {vocabulary - 1}"
                )
            _check_fields(row, recipe)
            trajectories.append(row.trajectory)
        return trajectories


def _check_fields(row: SavedRow, recipe: Recipe) -> None:
    """Refuse a row that has left out fields, or has others than the recipe's parts declare.

    Raises:
        RecipeError: It does.
    """
    columns = (row.columns, row.columns.get("score") or {}, *(row.columns.get("branches") or ()))
    if any(sample.get("fields_left_out") for sample in columns):
        raise RecipeError(f"{row.location} has left out fields that were too large; leave out --phase learn")
    declared = recipe.sampled_fields | recipe.scored_fields
    for sample in row.trajectory.samples:
        turns = sum(turn.role == "assistant" for turn in sample.turns)
        counts = {"token": (len(sample.tokens),), "turn": (turns,), "row": None}
        for name, values in (*sample.fields.items(), *(sample.score.fields.items() if sample.score else ())):
            if name not in declared:
                raise RecipeError(f"{row.location} has a field {name!r} that no part fills; leave out --phase learn")
            try:
                tensor = declared[name].tensor(values, counts[declared[name].by])
                if name == ROUTES and recipe.engine.routers is not None:
                    recipe.engine.routers.check(tensor)
            except ValueError as error:
                raise RecipeError(f"{row.location} does not fit the recipe: {error}") from error
