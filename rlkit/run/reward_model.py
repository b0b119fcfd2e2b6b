"""Validation of reward models: the order of their scores, compared with that of the recorded rewards."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rlkit.interfaces.loss import Inputs
from rlkit.models.activations import token_limit
from rlkit.ops.groups import pairs
from rlkit.ops.masked import last_of
from rlkit.rollout.collate import collate
from rlkit.rollout.recorded import check_recorded, recorded_group
from rlkit.rollout.service import RolloutService
from rlkit.run.validation_metrics import GradedCompletion
from rlkit.train.microbatch import forward_in_micro_batches
from rlkit.types import Prompt, Score, Trajectory


def score_recorded(
    service: RolloutService, prompts: Sequence[Prompt]
) -> tuple[list[Trajectory], list[GradedCompletion]]:
    """Score recorded completions and compare the order of the scores with that of their rewards.

    With a loss that reads rewards of turns, the score at the end of each turn is compared with the turn's reward.

    Returns:
        The trajectories of this rank, with the scores as rewards.
        The comparisons of this rank: one for each group, or each conversation if turns are compared.
    """
    ranks, dialogue = service.ranks, service.dialogue
    own_prompts = list(enumerate(prompts))[ranks.index :: ranks.count]
    by_turn = Inputs.TURN_REWARDS in service.recipe.loss.inputs
    if by_turn:
        check_recorded(prompts, service.recipe.loss)
    groups = [recorded_group(dialogue.template, prompt, group, dialogue.context) for group, prompt in own_prompts]
    trajectories = [trajectory for group in groups for trajectory in group]
    scores = _scores(service, trajectories)
    if by_turn:
        return trajectories, compare_turns(trajectories, scores)
    return trajectories, compare_order(trajectories, last_of(scores, collate(trajectories).mask))


def _scores(service: RolloutService, trajectories: Sequence[Trajectory]) -> Tensor:
    """Return the score [B,T] f32 of each conversation up to each token, on the CPU; all ranks must call this."""
    recipe, ranks, actor = service.recipe, service.ranks, service.actor

    def forward(tokens: Tensor, mask: Tensor) -> Sequence[Tensor]:
        with ranks.fabric.autocast():
            return (actor(tokens, mask).scores,)

    batch = collate(trajectories).to(ranks.fabric.device)
    limit, packed = token_limit(recipe.train, recipe.model, recipe.fabric), actor.passes.packed
    [scores] = forward_in_micro_batches(forward, batch, limit, ranks.all_reduce_max, packed=packed)
    return scores.cpu()


def compare_order(trajectories: Sequence[Trajectory], scores: Tensor) -> list[GradedCompletion]:
    """Replace rewards by scores [B]; return a comparison for each group with unequal rewards.

    Its accuracy is the share of its pairs in the right order, where equal scores count half. Its component `margin` is
    the mean difference of their scores.
    """
    rewards = torch.tensor([trajectory.reward or 0.0 for trajectory in trajectories])
    group = torch.tensor([trajectory.group for trajectory in trajectories], dtype=torch.long)
    pair_rows = pairs(rewards, group)
    pair_groups = group[pair_rows.better]
    margins = scores[pair_rows.better] - scores[pair_rows.worse]
    by_pair = torch.stack((margins, (margins.sign() + 1) / 2), -1)
    comparisons: dict[int, GradedCompletion] = {}
    usable_groups = set(pair_groups.tolist())
    for i, trajectory in enumerate(trajectories):
        if trajectory.group in usable_groups:
            margin, accuracy = by_pair[pair_groups == trajectory.group].mean(0).tolist()
            trajectory.score = Score(float(scores[i]), {"accuracy": accuracy, "recorded": float(rewards[i])})
            comparison = GradedCompletion.of(trajectory)._replace(components={"margin": margin})
            comparisons[trajectory.group] = comparison
    return list(comparisons.values())


def compare_turns(trajectories: Sequence[Trajectory], scores: Tensor) -> list[GradedCompletion]:
    """Replace rewards of turns by the scores [B,T] at their last tokens; return a comparison for each conversation.

    A score is right above 0 if the turn's recorded reward is 0.5 or more, and below 0 otherwise. The accuracy is the
    share of right turns, where scores of 0 count half. The component `margin` is the mean score, with the sign changed
    for turns of a lower reward.
    """
    comparisons = []
    for trajectory, row in zip(trajectories, scores, strict=True):
        recorded = (trajectory.score and trajectory.score.turn_rewards) or []
        turn_scores = [float(row[turn.end - 1]) for turn in trajectory.turns if turn.role == "assistant"]
        signed = [s if reward >= 0.5 else -s for s, reward in zip(turn_scores, recorded, strict=True)]
        margins = torch.tensor(signed)
        accuracy = float((margins.sign() + 1).mean() / 2)
        trajectory.score = Score(0.0, {"accuracy": accuracy}, turn_scores)
        comparison = GradedCompletion.of(trajectory)._replace(components={"margin": float(margins.mean())})
        comparisons.append(comparison)
    return comparisons
