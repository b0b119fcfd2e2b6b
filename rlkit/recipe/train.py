"""The sections of the training loop."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from rlkit.base.errors import RecipeError
from rlkit.base.ranges import (
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
from rlkit.interfaces.loss import PolicyLoss
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.interfaces.task import Task
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.correction import RejectLevel, Statistic, WeightLevel
from rlkit.ops.kl import KLEstimator
from rlkit.optimizers import AdamW
from rlkit.schedules import Constant


@dataclass
class Train:
    """The training loop.

    Args:
        steps: The number of rollout steps; null for `data_epochs`.
        data_epochs: The length of the run in passes over the training rows, instead of `steps`: rows x passes /
            `prompts_per_step` steps, rounded up. Rows that a recipe drops do not count.
        max_rows: The number of training rows, from the start of the task's; null for all.
        prompts_per_step: Prompts per step, over all ranks.
        minibatches: Optimizer steps per epoch over a rollout.
        epochs: Passes over a rollout.
        max_tokens_per_micro_batch: Maximum tokens per forward and backward pass, padding included; `auto` for as many
            as the device computes efficiently and a share of its memory holds. A longer row has its own pass, and so
            has a larger group if the loss reads groups.
        lr: The peak learning rate.
        optimizer: The optimizer, with its hyperparameters.
        weight_decay: The weight decay of matrices; other parameters have none.
        schedule: The learning rate after the warm-up.
        warmup_steps: Rollout steps in which the learning rate rises from 0.
        warmup_ratio: The same as a share of all steps, rounded up; null for `warmup_steps`.
        max_grad_norm: The norm to which gradients are clipped.
        entropy_coef: The weight of the policy's entropy, which is maximised.
        router_aux_loss_coef: The weight of the router's load-balancing loss, of a mixture of experts; usual: 0.001. It
            is computed in each micro-batch, over the tokens that predict completions, and averaged by their number.
        router_replay: Whether the routers of a mixture of experts select the experts with which the engine has
            computed each token, with weights of their own (R3, arXiv:2510.11370), in old log-probs and updates; `auto`
            where the engine returns them and may select others than the trainer. The reference and teachers choose
            freely.
        checkpoint_activations: Recompute activations in the backward pass instead of storing them: less memory, about
            a third more time.
        offload_activations: Move activations to host memory between the forward and the backward pass; only on a GPU.
            With `checkpoint_activations`, the inputs of layers are moved.
        offload_during_rollout: Offload to host memory during rollouts: optimizer states, critic and reference, and the
            policy if the engine has its own copy.
        deadline: Seconds that a rank waits for the other ranks before the run ends; with `rollout.max_staleness` also
            for rollouts that make no progress.
        aggregation: The weights of tokens and sequences in the loss; null for the loss's default.
        old_logps: The denominator of ratios: the trainer's log-probs before the update, recomputed; the engine's
            (`rollout`); or (`loglinear`) values between the engine's and the current ones, by the staleness of a token,
            without a forward pass of their own (A-3PO).
        off_policy_mask_threshold: At each optimizer step, mask tokens with a negative advantage in sequences whose
            mean of log pi_engine - log pi exceeds this, pi being the current policy; null for no mask.
        mask_truncated: Exclude completions that `max_tokens` or the context cut off from the loss. They count in the
            advantages of their group, and not in what the loss is divided by (DAPO, arXiv:2503.14476, section 3.4).
        ema: Decay per step of a moving average of the weights, saved as `ema/` beside `final/`; null for none.
        seed: The seed of the data's order and of every sampled token.
        shuffle: Whether each epoch has the rows in an order of its own; false for the data set's order.
        require_reward: Refuse the run if the trial call of the reward before the first step fails; false only warns,
            for a service that starts later.
        max_steps_without_signal: The number of consecutive steps, with equal rewards in each group, after which the run
            ends; null for no limit.
    """

    steps: PositiveInt | None = None
    data_epochs: PositiveFloat | None = None
    max_rows: PositiveInt | None = None
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
    router_aux_loss_coef: NonNegativeFloat = 0.0
    router_replay: bool | Literal["auto"] = "auto"
    checkpoint_activations: bool = False
    offload_activations: bool = False
    offload_during_rollout: bool = False
    deadline: Seconds = 1800.0
    aggregation: Aggregation | None = None
    old_logps: Literal["recompute", "rollout", "loglinear"] = "recompute"
    off_policy_mask_threshold: NonNegativeFloat | None = None
    mask_truncated: bool = False
    ema: PositiveShare | None = None
    seed: NonNegativeInt = 0
    shuffle: bool = True
    require_reward: bool = True
    max_steps_without_signal: PositiveInt | None = None

    def set_steps(self, rows: int) -> None:
        """Set `steps` from `data_epochs`, if it is the length of the run, for a number of training rows."""
        if self.steps is None and self.data_epochs is not None:
            steps = rows * self.data_epochs / self.prompts_per_step
            self.steps = max(ceil(round(steps, 6)), 1)

    @property
    def order_seed(self) -> int | None:
        """The seed of the order of rows; None for the data set's order."""
        return self.seed if self.shuffle else None

    @property
    def total_steps(self) -> int:
        """The number of rollout steps.

        Raises:
            RecipeError: It follows from the number of rows, and the data are not loaded.
        """
        if self.steps is None:
            raise RecipeError("train.data_epochs has no number of steps before the data are loaded; set train.steps")
        return self.steps

    @property
    def on_policy(self) -> bool:
        """Whether a rollout has a single optimizer step, so that the old policy is the current one."""
        return self.minibatches * self.epochs == 1


@dataclass
class KLLoss:
    """A term of the loss: coef * KL(policy || reference), estimated token by token.

    Args:
        coef: The weight of the term.
        estimator: The estimator; see `rlkit.ops.kl`.
        importance_weighted: Multiply the estimate by pi / pi_old, and by the weight of `correction`, so that it is
            unbiased for tokens of another policy, too.
    """

    coef: PositiveFloat = 0.001
    estimator: KLEstimator = "k3"
    importance_weighted: bool = False


@dataclass
class KLReward:
    """A penalty of the reward: coef * KL(policy || reference), estimated token by token.

    With a target the coefficient adapts (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    Args:
        coef: The weight of the penalty; with a target, the initial weight.
        estimator: The estimator; see `rlkit.ops.kl`.
        target: The target divergence; null for a constant coefficient.
        horizon: The time scale of the adaptation, in trajectories; a step changes the weight by a fifth at most.
    """

    coef: PositiveFloat = 0.001
    estimator: KLEstimator = "k1"
    target: PositiveFloat | None = None
    horizon: PositiveInt = 10000


@dataclass
class Shaping:
    """Transformations of rewards before advantages are computed; logged rewards are unchanged.

    Args:
        clip: The bound to which the absolute value of rewards is clipped.
        normalize: Divide by the running standard deviation of all rewards so far.
    """

    clip: PositiveFloat | None = None
    normalize: bool = False


@dataclass
class Correction:
    """Weights of each token's loss: pi_trainer / pi_engine.

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
    """Rejection of tokens or sequences for which engine and trainer differ too much.

    Args:
        statistic: k1 (the ratio itself), k2, k3 or binary_kl (KPop's, of the token against all others, both ways).
        level: Whether tokens are rejected, or sequences by their sum, mean or largest token.
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
        """The largest statistic that is kept, with its default."""
        return self.high or (0.1 if self.statistic == "binary_kl" else 2.0)


@dataclass
class Mixture:
    """A further stream in each step: weight * its loss, divided by its own tokens, is added to the loss.

    With a task, the stream is recorded completions, as in supervised training: pre-training texts (Ouyang et al. 2022,
    arXiv:2203.02155, equation 2), or old data against forgetting. Without a task, it is the replies of tools, users and
    environments in the step's own conversations, after the policy's first turn (Shrivastava et al. 2026,
    arXiv:2605.24517). Log-probs are at temperature 1.

    Args:
        weight: The factor of its loss; 0 only measures it.
        task: The source of the completions; null for the replies to the policy in this step.
        loss: The loss of these tokens; null for `CrossEntropy`. It reads neither advantages nor old log-probs.
        prompts_per_step: Prompts of the task in a step, over all ranks; null for `train.prompts_per_step`.
    """

    weight: NonNegativeFloat
    task: Task | None = None
    loss: PolicyLoss | None = None
    prompts_per_step: Count | None = None
