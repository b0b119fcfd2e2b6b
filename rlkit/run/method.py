"""What a run does in each way to train: its steps, its validations, and what it checks before the first step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlkit.data.data import Data
from rlkit.recipe import Recipe
from rlkit.recipe.method import ReinforcementLearning, RewardModelling
from rlkit.rollout.service import RolloutService
from rlkit.run.evaluate import Evaluation, evaluate_completions, evaluate_reward_model
from rlkit.run.preflight.picture_check import check_pictures
from rlkit.run.preflight.weight_check import check_weights
from rlkit.train.held_out import held_out_losses
from rlkit.train.models import Models
from rlkit.train.phases import StepResult
from rlkit.train.rl import rl_step
from rlkit.train.rollouts import Obtain, recorded
from rlkit.train.sampling import sample
from rlkit.train.setup import TrainContext
from rlkit.train.supervised import supervised_step
from rlkit.types import Prompt


class Procedure(NamedTuple):
    """The functions of a way to train.

    Args:
        obtain: Returns the rollouts of a step.
        step: Runs a step; it gets its number and what returns its rollouts.
        evaluate: Validates on prompts; all ranks call it.
        checks: Compare the engine with the trainer before the first step.
        losses: Returns the losses of prompts' recorded completions, by their names; None where steps sample what they
            learn from.
    """

    obtain: Obtain
    step: Callable[[TrainContext, int, Obtain], StepResult]
    evaluate: Callable[[RolloutService, Sequence[Prompt]], Evaluation]
    checks: Sequence[Callable[[Data, RolloutService], object]]
    losses: Callable[[Data, Models, RolloutService, Sequence[Prompt]], dict[str, float]] | None = None


def procedure_of(recipe: Recipe) -> Procedure:
    """Return the functions of a recipe's way to train; where nothing is sampled, there is no engine to check."""
    match recipe.method:
        case ReinforcementLearning():
            return Procedure(sample, rl_step, evaluate_completions, (check_weights, check_pictures))
        case RewardModelling():
            return Procedure(recorded, supervised_step, evaluate_reward_model, (), held_out_losses)
        case _:
            checks = (check_weights, check_pictures) if recipe.samples_validation else ()
            return Procedure(recorded, supervised_step, evaluate_completions, checks, held_out_losses)
