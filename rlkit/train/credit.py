"""From rewards to advantages: corrections, transforms of rewards whose state checkpoints hold, and the estimator."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlkit.data.checks import reference_rewards
from rlkit.distributed.ranks import Ranks
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.ops import correction, kl
from rlkit.ops.masked import Reducer, masked_mean, span_sums
from rlkit.recipe import Correction, KLReward, Rejection, Shaping
from rlkit.registry import calling, require
from rlkit.types import Batch, Trajectory

Metrics = dict[str, float]

OWN_METRICS = ("not_finite", "max", "abs_mean")
"""What the step itself logs as `advantage/NAME`."""


class RewardTransforms:
    """Changes rewards on their way to the advantages; checkpoints hold its state."""

    def __init__(self, shaping: Shaping | None, kl: KLReward | None) -> None:
        self.shaper = None if shaping is None else RewardShaper(shaping)
        self.kl_penalty = None if kl is None else KLPenalty(kl)

    def apply(self, batch: Batch, reduce: Reducer) -> Metrics:
        """Shape `batch.token_rewards`, then take KL off them; return metrics by name."""
        if self.shaper is not None:
            self.shaper.apply(batch, reduce)
        return {} if self.kl_penalty is None else self.kl_penalty.apply(batch, reduce)


class KLPenalty:
    """Takes KL to the reference off the token rewards, with a fixed or an adaptive coefficient.

    Adaptive: beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) min(n / horizon, 1)) after a batch of n trajectories.
    """

    def __init__(self, section: KLReward) -> None:
        self.section = section
        self.coef = section.coef

    def apply(self, batch: Batch, reduce: Reducer) -> Metrics:
        """Change `batch.token_rewards`; return the divergence and the coefficient that was used."""
        logps, ref_logps = batch.required("trainer_logps"), batch.required("ref_logps")
        penalty = kl.estimate(logps, ref_logps, self.section.estimator) * batch.mask
        batch.token_rewards = batch.token_rewards - self.coef * penalty
        per_row = penalty.sum(-1) / batch.mask.sum(-1).clamp(min=1)
        rows = batch.mask.any(-1)
        divergence = float(masked_mean(per_row, rows, reduce))
        used = self.coef
        if self.section.target is not None:
            count = float(reduce(rows.sum().float()))
            error = min(max(divergence / self.section.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * min(count / self.section.horizon, 1.0)
        return {"reward/kl_reward": divergence, "reward/kl_coef": used}


class RewardShaper:
    """Clips rewards and divides them by their running standard deviation (Welford's, merged batch by batch)."""

    def __init__(self, section: Shaping) -> None:
        self.section = section
        self.count = self.mean = self.squares = 0.0

    def apply(self, batch: Batch, reduce: Reducer) -> None:
        """Change `batch.token_rewards`, row by row in proportion, so that each row's sum is the shaped reward.

        Rewards of greedy answers, which these are compared with, are shaped alike.
        """
        if self.section.normalize:
            self._observe(batch.rewards.double(), reduce)
        batch.token_rewards = (batch.token_rewards * self._scale(batch.rewards)[:, None]).float()
        if batch.greedy_rewards is not None:
            batch.greedy_rewards = (batch.greedy_rewards * self._scale(batch.greedy_rewards)).float()

    def _scale(self, rewards: Tensor) -> Tensor:
        """Return the factor of each reward [B], in float64."""
        std = (self.squares / max(self.count - 1, 1)) ** 0.5 if self.section.normalize else 0.0
        scale = torch.full_like(rewards, 1 / std if std > 0 else 1.0, dtype=torch.float64)
        if self.section.clip is not None:
            scale = scale.minimum(self.section.clip / rewards.double().abs())  # infinite where the reward is 0
        return scale

    def _observe(self, rewards: Tensor, reduce: Reducer) -> None:
        count, total = reduce(torch.stack((torch.ones_like(rewards).sum(), rewards.sum()))).tolist()
        if count == 0:
            return
        mean = total / count
        squares = float(reduce(((rewards - mean) ** 2).sum()))
        apart, together = mean - self.mean, self.count + count
        self.squares += squares + apart**2 * self.count * count / together
        self.mean += apart * count / together
        self.count = together


def correct(batch: Batch, weigh: Correction | None, reject: Rejection | None, reduce: Reducer) -> Metrics:
    """Set the weights and the accepted tokens by the gap between engine and trainer; return metrics by name."""
    metrics = {}
    if weigh is not None:
        weights = correction.importance_weights(
            batch.required("trainer_logps"),
            batch.rollout_logps,
            batch.mask,
            level=weigh.level,
            low=weigh.low,
            high=weigh.high,
        )
        batch.correction_weights = weights
        metrics["correction/weight_mean"] = float(masked_mean(weights, batch.mask, reduce))
    if reject is not None:
        accepted = correction.accepted(
            batch.required("trainer_logps"),
            batch.rollout_logps,
            batch.mask,
            correction.AcceptanceRule(reject.statistic, reject.level, reject.low, reject.highest),
        )
        batch.accepted = accepted
        metrics["correction/rejected"] = 1 - float(masked_mean(accepted, batch.mask, reduce))
    return metrics


def mask_truncated(batch: Batch, trajectories: Sequence[Trajectory]) -> None:
    """Exclude the tokens of truncated trajectories, the rows of the batch, from the loss."""
    finished = torch.tensor([not t.stop.truncated for t in trajectories], dtype=torch.bool, device=batch.mask.device)
    batch.accepted = (batch.mask if batch.accepted is None else batch.accepted) & finished[:, None]


def distill(batch: Batch, coef: float, reduce: Reducer) -> Metrics:
    """Add coef * (log pi_teacher - log pi) to the advantages, 0 where no teacher has read a token.

    Return the mean of the negative, which is the KL to the teacher, and the number of tokens that none has read. With
    `teacher_spans` both are log-probs of a span, an action whose gradient all of its tokens have. A loss that reads the
    teacher's distributions itself has nothing of it in the advantages.
    """
    top = batch.teacher_top_logps
    teacher_logps = batch.required("teacher_logps") if top is None or batch.teacher_spans is not None else top[..., 0]
    is_read = batch.mask & ~teacher_logps.isnan()
    metrics = {"teacher/unread": float(reduce((batch.mask & ~is_read).sum().float()))}
    if batch.teacher_top_logps is None:
        policy_logps, spans = batch.required("trainer_logps"), batch.teacher_spans
        if spans is not None:
            policy_logps = span_sums(policy_logps, spans)
        gap = torch.where(is_read, policy_logps - teacher_logps, 0.0)
        batch.advantages = batch.required("advantages") - coef * gap
        if spans is not None:
            gap = gap / span_sums(torch.ones_like(gap), spans)
        metrics["teacher/kl"] = float(masked_mean(gap, is_read, reduce))
    return metrics


def estimate(estimator: AdvantageEstimator | None, batch: Batch, has_critic: bool = False) -> None:
    """Fill the advantages, with 0 without an estimator, and name it if they are not what they must be.

    Raises:
        PartError: It raised, left a field unset, or what it set has another shape or type, or is not finite though
            all that it read was.
    """
    if estimator is None:
        batch.advantages = torch.zeros_like(batch.token_rewards)
        return
    read = batch.tensors().values()
    with calling(estimator, "estimate"):
        estimator.estimate(batch)
    if len(batch):
        require(estimator, "estimate", outputs.of_metrics(batch.metrics, OWN_METRICS))
        batch.metrics = MappingProxyType(dict(batch.metrics))
    problem = outputs.of_estimator(batch)
    if problem is not None and (
        batch.advantages is None or all(bool(x.isfinite().all()) for x in read if x.is_floating_point())
    ):
        require(estimator, "estimate", problem)
    if has_critic and batch.returns is None:
        require(estimator, "estimate", "left batch.returns unset, which the critic learns from")


def estimate_by_rollout(estimator: AdvantageEstimator | None, batch: Batch) -> None:
    """Fill the advantages where rollouts have several samples: the estimator sees one row of each rollout, or role.

    The others have the mean advantage of its tokens, which is that of each token where the outcome alone counts.

    Raises:
        PartError: As `estimate`.
    """
    rollouts = batch.rollouts()
    estimate(estimator, rollouts)
    batch.metrics = rollouts.metrics
    advantages = rollouts.required("advantages")
    main = torch.ones_like(batch.group, dtype=torch.bool) if batch.main is None else batch.main
    means = (advantages * rollouts.mask).sum(-1) / rollouts.mask.sum(-1).clamp(min=1)
    batch.advantages = means[main.cumsum(0) - 1][:, None] * batch.mask
    batch.advantages[main, : advantages.shape[1]] = advantages


def attach_reference_rewards(trajectories: Sequence[Trajectory], batch: Batch) -> None:
    """Set `batch.reference_rewards` by the rows of the trajectories' prompts.

    Raises:
        RecipeError: A row has none.
    """
    rewards = [torch.tensor(reference_rewards(trajectory.prompt)) for trajectory in trajectories]
    padded = pad_sequence(rewards, batch_first=True, padding_value=nan) if rewards else torch.zeros(0, 0)
    batch.reference_rewards = padded.to(batch.rewards)


def attach_roles(trajectories: Sequence[Trajectory], batch: Batch, ranks: Ranks) -> None:
    """Set `batch.role` and `batch.role_names`, which all ranks agree on; all ranks must call this."""
    sources = [trajectory.prompt.source_name for trajectory in trajectories]
    roles = [trajectory.span.role or "agent" for trajectory in trajectories]
    names = [f"{source}/{role}" if source else role for source, role in zip(sources, roles, strict=True)]
    all_names = sorted({name for of_rank in ranks.gather_dp(sorted(set(names))) for name in of_rank})
    batch.role_names = tuple(all_names)
    batch.role = torch.tensor([all_names.index(name) for name in names], dtype=torch.long, device=batch.rewards.device)
