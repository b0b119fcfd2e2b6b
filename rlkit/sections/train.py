"""How the policy learns from a rollout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.correction import RejectLevel, Statistic, WeightLevel
from rlkit.ops.kl import KLEstimator
from rlkit.optimizers import AdamW
from rlkit.ranges import (
    Count,
    FiniteFloat,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Seconds,
    ShareBelowOne,
)
from rlkit.schedules import Constant


@dataclass
class Train:
    """The training loop.

    Args:
        steps: Rollout steps in total.
        prompts_per_step: Prompts per step, over all ranks.
        minibatches: Optimizer steps per epoch over a rollout.
        epochs: Passes over a rollout.
        max_tokens_per_micro_batch: Maximum tokens per forward and backward pass, padding included; `auto` for as many
            as the device computes efficiently and a share of its memory holds. A longer row has a pass of its own, as
            has a larger group if the loss reads groups.
        lr: The peak learning rate.
        optimizer: The optimizer, with its hyperparameters.
        weight_decay: For matrices only.
        schedule: The learning rate after the warm-up.
        warmup_steps: Rollout steps in which the learning rate rises from 0.
        warmup_ratio: The same as a share of `steps`, rounded up; null for `warmup_steps`.
        max_grad_norm: The gradient's norm is clipped to this.
        entropy_coef: Adds the policy's entropy to what is maximised.
        checkpoint_activations: Recompute activations in the backward pass instead of storing them: less memory, about
            a third more time.
        offload_during_rollout: Offload to host memory, during rollouts, what sampling does not need: optimizer states,
            critic and reference, and the policy if the engine has its own copy.
        deadline: Seconds that a rank waits for the others before the run ends; with `rollout.max_staleness` also how
            long it waits for rollouts of which none makes progress.
        aggregation: How tokens and sequences are weighted; null for the loss's default.
        old_logps: The denominator of ratios: the trainer's log-probs before the update, recomputed, or the engine's, or
            between the engine's and the current ones by the staleness of a token, without a pass of their own (A-3PO).
        off_policy_mask_threshold: Leave out, at each optimizer step, tokens with a negative advantage in sequences
            whose mean of log pi_engine - log pi exceeds this, pi being the policy that learns; null for none.
        ema: Decay per step of a moving average of the weights, saved as `ema/` beside `final/`; null for none.
        seed: Of the data's order and of every sampled token.
        require_reward: Refuse the run if the trial call of the reward before the first step fails; false warns only,
            for a service that starts later.
        max_steps_without_signal: End the run after this many consecutive steps in which all samples of each prompt had
            equal rewards; null for no limit.
    """

    steps: PositiveInt
    prompts_per_step: Count = 32
    minibatches: Count = 1
    epochs: Count = 1
    max_tokens_per_micro_batch: PositiveInt | Literal["auto"] = "auto"
    lr: LearningRate = 1e-6
    optimizer: Optimizer = field(default_factory=AdamW)
    weight_decay: NonNegativeFloat = 0.0
    schedule: Schedule = field(default_factory=Constant)
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: ShareBelowOne | None = None
    max_grad_norm: PositiveFloat = 1.0
    entropy_coef: FiniteFloat = 0.0
    checkpoint_activations: bool = False
    offload_during_rollout: bool = False
    deadline: Seconds = 1800.0
    aggregation: Aggregation | None = None
    old_logps: Literal["recompute", "rollout", "loglinear"] = "recompute"
    off_policy_mask_threshold: NonNegativeFloat | None = None
    ema: PositiveShare | None = None
    seed: NonNegativeInt = 0
    require_reward: bool = True
    max_steps_without_signal: PositiveInt | None = None

    @property
    def on_policy(self) -> bool:
        """Whether a rollout makes one optimizer step, so that the old policy is the one that learns."""
        return self.minibatches * self.epochs == 1


@dataclass
class KLLoss:
    """Adds coef * KL(policy || reference), estimated token by token, to the loss.

    Args:
        coef: Its weight.
        estimator: The estimator; see `rlkit.ops.kl`.
        importance_weighted: Multiply the estimate by pi / pi_old, and by the weight of `correction`: without bias also
            for tokens that another policy has sampled.
    """

    coef: PositiveFloat = 0.001
    estimator: KLEstimator = "k3"
    importance_weighted: bool = False


@dataclass
class KLReward:
    """Takes coef * KL(policy || reference), estimated token by token, off the reward.

    With a target the coefficient adapts (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Args:
        coef: Its weight; the initial one if it adapts.
        estimator: The estimator; see `rlkit.ops.kl`.
        target: The target divergence; null for a constant coefficient.
        horizon: Time scale of the adaptation, in trajectories.
    """

    coef: PositiveFloat = 0.001
    estimator: KLEstimator = "k1"
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10000


@dataclass
class Shaping:
    """Transformations of rewards before advantages are computed; logged rewards are unchanged.

    Args:
        clip: Rewards are clipped to +- this.
        normalize: Divide by the running standard deviation of all rewards so far.
    """

    clip: PositiveFloat | None = None
    normalize: bool = False


@dataclass
class Correction:
    """Weights each token's loss by pi_trainer / pi_engine.

    Args:
        level: The ratio of each token, or of the whole sequence.
        low: Weights below this, or above `high`, become 0 (IcePop); null caps them at `high` (TIS).
        high: The largest weight.
    """

    level: WeightLevel = "token"
    low: PositiveFloat | None = None
    high: PositiveFloat = 2.0


@dataclass
class Rejection:
    """Rejects tokens or sequences for which engine and trainer differ too much.

    Args:
        statistic: k1 (the ratio itself), k2, k3 or binary_kl (KPop's, of the token against all others, both ways).
        level: A token by itself, or a sequence by its sum, mean or largest token.
        low: The smallest ratio that is kept (k1 only); null is 1 / high.
        high: The largest statistic that is kept; null is 2, and 0.1 for binary_kl.
        keep_in_denominator: Divide the loss by the count of all tokens, rejected ones included.
    """

    statistic: Statistic = "k1"
    level: RejectLevel = "token"
    low: PositiveFloat | None = None
    high: PositiveFloat | None = None
    keep_in_denominator: bool = False

    @property
    def highest(self) -> float:
        """The largest statistic that is kept."""
        return self.high or (0.1 if self.statistic == "binary_kl" else 2.0)
