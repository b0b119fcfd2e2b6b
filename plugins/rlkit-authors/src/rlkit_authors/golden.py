"""Vectors computed by hand, to check an estimator or a loss: `golden.check("GRPO", MyGRPO())`."""

from __future__ import annotations

import torch

from rlkit.interfaces.advantage import AdvantageEstimator
from rlkit.interfaces.loss import PolicyLoss
from rlkit.types import Batch, PolicyOutput, TrainBatch

REWARDS = (1.0, 0.0, 0.0, 1.0, 0.5, 1.0, 1.0)
GROUPS = (0, 0, 0, 0, 1, 2, 2)
LENGTHS = (2, 4, 3, 3, 3, 1, 2)
"""Seven completions: a group of four with two right, a group of one, and a group of two equal rewards."""

ADVANTAGES: dict[str, tuple[float, ...]] = {
    "GRPO": (0.866024, -0.866024, -0.866024, 0.866024, 0, 0, 0),  # 0.5 / (sqrt(1/3) + 1e-6)
    "GRPO without scaling": (0.5, -0.5, -0.5, 0.5, 0, 0, 0),
    "RLOO": (2 / 3, -2 / 3, -2 / 3, 2 / 3, 0, 0, 0),  # 4/3 * 0.5
    "OPO": (7 / 12, -5 / 12, -5 / 12, 7 / 12, 0, 0, 0),  # baseline (2 + 3) / 12
    "GPG": (0.7, -0.7, -0.7, 0.7, 0, 0, 0),  # 7 rows / 5 rewarded rows * 0.5
    "MaxRL": (1, -1, -1, 1, 0, 0, 0),  # 0.5 / 0.5
    "PassK": (0, 0, 0, 0, 0, 0, 0),  # two are best
}
"""The advantage of each completion, by estimator."""

TOKENS = ((0.5, 1.0), (0.5, -1.0), (1.5, -1.0), (-0.5, 1.0), (-0.5, -1.0))
"""Tokens as (log-ratio, advantage); the old log-prob is -1."""

LOSSES: dict[str, tuple[float, ...]] = {
    "ClipLoss": (-1.2, 1.648721, 4.481689, -0.606531, 0.8),  # clip 0.2 on both sides
    "ClipLoss with dual clip": (-1.2, 1.648721, 3.0, -0.606531, 0.8),  # dual clip 3
    "PolicyGradient": (0.5, -0.5, 0.5, 1.5, -1.5),  # -A (-1 + log-ratio)
    "SAPO": (-2.626889, 2.529512, 3.713560, -1.611530, 1.516795),  # tau 1 and 1.05
    "CISPO": (0.6, -0.6, 0.6, 0.909796, -0.909796),  # clip 1 and 0.2
}
"""The loss of each token, by loss."""

OPTIONS = {"CISPO": {"clip_low": 1.0, "clip_high": 0.2}}
"""Options of parts whose vector does not use their defaults."""


def check(name: str, part: AdvantageEstimator | PolicyLoss) -> None:
    """Compare a part with the vector of that name.

    Raises:
        KeyError: No vector has that name.
        AssertionError: The part returns other numbers; the message shows both.
    """
    if isinstance(part, AdvantageEstimator):
        actual = advantages(part)
        expected = ADVANTAGES[name]
    else:
        actual = losses(part)
        expected = LOSSES[name]
    torch.testing.assert_close(
        actual,
        torch.tensor(expected, dtype=torch.float32),
        rtol=1e-5,
        atol=1e-5,
        msg=lambda text: f"{name}: {actual.tolist()}\n{text}",
    )


def advantages(estimator: AdvantageEstimator) -> torch.Tensor:
    """Return an estimator's advantages [7] of the completions."""
    width = max(LENGTHS)
    mask = torch.arange(width) < torch.tensor(LENGTHS)[:, None]
    rewards = torch.zeros(len(REWARDS), width)
    rewards[torch.arange(len(REWARDS)), torch.tensor(LENGTHS) - 1] = torch.tensor(REWARDS)
    batch = _batch(mask, rewards, torch.tensor(GROUPS))
    estimator.estimate(batch)
    assert batch.advantages is not None
    return batch.advantages[:, 0]


def losses(loss: PolicyLoss) -> torch.Tensor:
    """Return the losses [5] of the tokens, each a sequence of its own."""
    log_ratios, signs = (torch.tensor(column)[:, None] for column in zip(*TOKENS, strict=True))
    mask = torch.ones(len(TOKENS), 1, dtype=torch.bool)
    batch = _batch(mask, torch.zeros(len(TOKENS), 1), torch.arange(len(TOKENS)))
    batch.old_logps = torch.full(mask.shape, -1.0)
    batch.advantages = signs
    return loss(PolicyOutput(log_ratios - 1.0, None), TrainBatch.of(batch)).per_token[:, 0]


def _batch(mask: torch.Tensor, rewards: torch.Tensor, group: torch.Tensor) -> Batch:
    zeros = torch.zeros_like(rewards)
    return Batch(
        tokens=zeros.long(),
        attention=mask,
        mask=mask,
        rollout_logps=zeros,
        group=group,
        versions=zeros.long(),
        token_rewards=rewards,
        rewards=rewards.sum(-1),
        components=torch.zeros(len(group), 0),
    )
