"""The sections of a recipe that are not parts: plain options, documented where they are defined."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.correction import RejectLevel, Statistic, WeightLevel
from rlkit.ops.kl import KLEstimator
from rlkit.optimizers import AdamW
from rlkit.ranges import (
    NUMBER,
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
from rlkit.types import Sampling


@dataclass
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through peft.

    Args:
        rank: The adapters' rank.
        alpha: Their scale is alpha / rank.
        targets: `all-linear`, or the names of the modules that get one.
    """

    rank: Annotated[int, Ge(1), Le(4096), NUMBER] = 16
    alpha: PositiveFloat = 32.0
    targets: str | list[str] = "all-linear"


@dataclass
class Model:
    """The policy.

    Args:
        path: A name on the Hugging Face hub; `tiny` or `tiny-tools`, which rlkit ships; or a folder: of a model, of an
            adapter, of a run or of one of its checkpoints.
        lora: Train adapters instead of all weights. Those of an adapter at `path` are trained further, and must be of
            the same shape; without this section they are merged, and all weights are trained.
        dtype: The type of weights that are not trained: the base under adapters, and the reference. Weights that are
            trained are float32.
        attention: The implementation of attention, of those in transformers; `auto` is `sdpa` where the model has it,
            else `eager`. Only `sdpa` learns from rows without padding; those of flash attention need their packages, a
            GPU and bf16. TorchEngine has an attention of its own.
        trust_remote_code: Run code that comes with the model.
    """

    path: str
    lora: Lora | None = None
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    trust_remote_code: bool = False


@dataclass
class Rollout:
    """How trajectories are sampled.

    Args:
        engine: The rollout engine.
        group_size: Samples of each prompt.
        sampling: How tokens are sampled in training.
        filter: Which groups to train on; null trains on all.
        max_gap: The largest mean distance of the engine's log-probs of a few tokens from the trainer's, in the weight
            check before the first rollout; null for 1e-3 in float32 and 0.2 in lower precisions.
        skip_long_prompts: Leave out prompts that do not fit the context, instead of refusing the run.
        max_conversations: How many conversations run at once on a rank, while others wait for their admission; null
            for as many as the engine can hold. More keep an engine busy whose conversations wait for tools.
    """

    engine: RolloutEngine = None  # type: ignore[assignment]  # until a recipe is composed, which names TorchEngine
    group_size: Count = 8
    sampling: Sampling = field(default_factory=Sampling)
    filter: GroupFilter | None = None
    max_gap: PositiveFloat | None = None
    skip_long_prompts: bool = False
    max_conversations: Count | None = None


@dataclass
class Train:
    """The training loop.

    Args:
        steps: Rollout steps in total.
        prompts_per_step: Prompts per step, over all ranks.
        minibatches: Optimizer steps per epoch over a rollout.
        epochs: Passes over a rollout.
        max_tokens_per_micro_batch: Maximum tokens per forward and backward pass, padding included; `auto` for as many
            as the device computes efficiently and a share of its memory holds.
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
        deadline: Seconds that a rank waits for the others before the run ends.
        aggregation: How tokens and sequences are weighted; null for the loss's default.
        old_logps: The denominator of ratios: the trainer's log-probs before the update, recomputed, or the engine's.
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
    old_logps: Literal["recompute", "rollout"] = "recompute"
    ema: PositiveShare | None = None
    seed: NonNegativeInt = 0
    require_reward: bool = True
    max_steps_without_signal: PositiveInt | None = None

    @property
    def on_policy(self) -> bool:
        """Whether a rollout makes one optimizer step, so that the old policy is the one that learns."""
        return self.minibatches * self.epochs == 1


@dataclass
class FSDP2:
    """The strategy that shards parameters, gradients and optimizer states over all ranks.

    Args:
        tensor_parallel: Ranks that share each matrix product; the others are data-parallel. Divides the ranks.
        offload: Keep parameters and optimizer states in host memory between uses.
    """

    tensor_parallel: Count = 1
    offload: bool = False


Environment = Literal[
    "LightningEnvironment", "LSFEnvironment", "MPIEnvironment", "SLURMEnvironment", "TorchElasticEnvironment"
]
"""Lightning Fabric's classes for what starts the processes of a run."""


@dataclass
class Fabric:
    """The options of Lightning Fabric that rlkit trains with.

    Args:
        accelerator: The kind of device; `auto` is a GPU if there is one.
        devices: How many per node, or which ones.
        num_nodes: Number of nodes.
        strategy: How ranks share the work: `ddp` replicates the model, `fsdp2` shards it, and so does `FSDP2`, which
            has options; `auto` is `ddp` on several devices.
        precision: Of the computations; trained weights are float32 in any case, and `bf16-true` is for frozen ones
            under adapters. `32-true` is float32 on GPUs too: TF32 is off.
        plugins: The cluster environment, if Fabric does not detect it.
    """

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Literal["auto"] | Count | list[NonNegativeInt] = "auto"
    num_nodes: Count = 1
    strategy: Literal["auto", "ddp", "fsdp2"] | FSDP2 = "auto"
    precision: Literal["32-true", "64-true", "bf16-mixed", "bf16-true"] = field(
        default="32-true",
        metadata={
            "remedy": "with 16 bits most of AdamW's small updates of trained weights round away, or gradients "
            "overflow: use bf16-mixed"
        },
    )
    plugins: list[Environment] | None = None

    @property
    def shards(self) -> bool:
        """Whether a rank holds only shards of the weights."""
        return self.strategy == "fsdp2" or isinstance(self.strategy, FSDP2)


@dataclass
class Save:
    """Checkpoints: all that a run needs to resume as if it had never stopped.

    Args:
        every: Steps between checkpoints; 0 for none during the run. The last step, or that of a Ctrl-C, always has one.
        keep_last: How many to keep; older ones are removed.
        keep_best: A metric of `metrics.jsonl`, higher is better, such as `validation/accuracy`: the checkpoint of its
            best step is kept as well.
        folder: A folder or any fsspec URL; null for `checkpoints/` in the run folder.
    """

    every: NonNegativeInt = 100
    keep_last: PositiveInt = 2
    keep_best: str | None = None
    folder: str | None = None


@dataclass
class Validation:
    """Held-out prompts, answered greedily and by sampling; null for none.

    Args:
        before: Whether to validate before training.
        every: Steps between validations; 0 for none. That of the last step is the one after training, if there is one.
        after: Whether to validate after training.
        limit: Prompts, from the start of the split; null for all of it.
        samples: Sampled answers per prompt, besides the greedy one; 0 for none.
        sampling: How they are sampled; null for the sampling of training.
        patience: Training ends after so many validations in a row without a new best; null for never.
        watch: The figure of which the highest is best, for `patience`.
    """

    before: bool = True
    every: NonNegativeInt = 0
    after: bool = True
    limit: PositiveInt | None = None
    samples: Annotated[int, Ge(0), Le(65536), NUMBER] = 1
    sampling: Sampling | None = None
    patience: PositiveInt | None = None
    watch: str = "accuracy"


@dataclass
class Conversation:
    """Limits of conversations of several turns; only with tools, an interaction or an environment.

    Args:
        turns: Maximum turns of the policy.
        tokens: Maximum tokens of all its turns; null for the context's limit. `sampling.max_tokens` limits one turn.
        tool_calls: Maximum number of calls; a turn that exceeds it ends the conversation.
        seconds: Deadline, from its admission; time in the engine and in the queues of tools and workers does not count.
        check: Compare each conversation with the template's own rendering: count differences, or fail it (`strict`).
    """

    turns: Count = 8
    tokens: PositiveInt | None = None
    tool_calls: Count | None = 16
    seconds: Seconds | None = 600.0
    check: Literal["off", "warn", "strict"] = "warn"


@dataclass
class KLLoss:
    """Adds coef * KL(policy || reference), estimated token by token, to the loss.

    Args:
        coef: Its weight.
        estimator: The estimator; see `rlkit.ops.kl`.
    """

    coef: PositiveFloat = 0.001
    estimator: KLEstimator = "k3"


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
class Reference:
    """Updates of the policy that KL is measured against; without them it stays the initial one.

    Args:
        refresh_every: Steps between updates.
        mix: Weight of the policy: reference = mix * policy + (1 - mix) * reference.
    """

    refresh_every: PositiveInt
    mix: PositiveShare = 1.0


@dataclass
class Critic:
    """Learns the values that GAE needs: a value head on a backbone of its own.

    Args:
        path: The backbone's model, with the policy's tokenizer; null takes the policy's.
        lora: Train adapters of the backbone, and the head, instead of all weights.
        lr: The peak learning rate.
        optimizer: The optimizer, with its hyperparameters.
        weight_decay: For matrices only.
        schedule: The learning rate after the warm-up.
        warmup_steps: Rollout steps in which the learning rate rises from 0.
        warmup_ratio: The same as a share of `train.steps`, rounded up; null for `warmup_steps`.
        max_grad_norm: The gradient's norm is clipped to this.
        clip: The largest change of a value from the old one before its loss is clipped; null for no clipping.
        policy_delay_steps: Steps at the start in which only the critic is trained.
    """

    path: str | None = None
    lora: Lora | None = None
    lr: LearningRate = 1e-5
    optimizer: Optimizer = field(default_factory=AdamW)
    weight_decay: NonNegativeFloat = 0.0
    schedule: Schedule = field(default_factory=Constant)
    warmup_steps: NonNegativeInt = 0
    warmup_ratio: ShareBelowOne | None = None
    max_grad_norm: PositiveFloat = 1.0
    clip: PositiveFloat | None = 0.5
    policy_delay_steps: NonNegativeInt = 0


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
        statistic: k1 (the ratio itself), k2 or k3.
        level: A token by itself, or a sequence by its sum, mean or largest token.
        low: The smallest ratio that is kept (k1 only); null is 1 / high.
        high: The largest statistic that is kept.
        keep_in_denominator: Divide the loss by the count of all tokens, rejected ones included.
    """

    statistic: Statistic = "k1"
    level: RejectLevel = "token"
    low: PositiveFloat | None = None
    high: PositiveFloat = 2.0
    keep_in_denominator: bool = False
