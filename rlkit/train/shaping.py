"""What changes a reward on its way to the advantage; each holds state that a run goes on with."""

from __future__ import annotations

import torch
from torch import Tensor

from rlkit.ops import kl
from rlkit.ops.masked import Reducer, masked_mean, masked_sum
from rlkit.sections import KLReward, Shaping
from rlkit.types import Batch


class RewardTransforms:
    """What changes rewards on their way to the advantages; checkpoints hold its state."""

    def __init__(self, shaping: Shaping | None, kl: KLReward | None) -> None:
        self.shaper = None if shaping is None else RewardShaper(shaping)
        self.kl_penalty = None if kl is None else KLPenalty(kl)


class KLPenalty:
    """Takes KL to the reference off the token rewards, with a fixed or an adaptive coefficient.

    Adaptive: beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon) after each batch of n trajectories.
    """

    def __init__(self, section: KLReward) -> None:
        self.section = section
        self.coef = section.coef

    def apply(self, batch: Batch, reduce: Reducer) -> dict[str, float]:
        """Change `batch.token_rewards`; give the divergence and the coefficient that was used."""
        assert batch.trainer_logps is not None
        assert batch.ref_logps is not None
        penalty = kl.estimate(batch.trainer_logps, batch.ref_logps, self.section.estimator) * batch.mask
        batch.token_rewards = batch.token_rewards - self.coef * penalty
        per_row = masked_sum(penalty, batch.mask, -1) / batch.mask.sum(-1).clamp(min=1)
        rows = batch.mask.any(-1)
        divergence = float(masked_mean(per_row, rows, reduce))
        used = self.coef
        if self.section.target is not None:
            count = float(reduce(rows.sum().float()))
            error = min(max(divergence / self.section.target - 1, -0.2), 0.2)
            self.coef *= 1 + error * count / self.section.horizon
        return {"kl_reward": divergence, "kl_coef": used}


class RewardShaper:
    """Clips rewards and divides them by their running standard deviation (Welford's, merged batch by batch)."""

    def __init__(self, section: Shaping) -> None:
        self.section = section
        self.count = 0.0
        self.mean = 0.0
        self.squares = 0.0

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
        """Return what each reward [B] is multiplied by, in float64."""
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
