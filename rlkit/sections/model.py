"""The policy, its reference and its critic."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le

from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.names import SourceName
from rlkit.optimizers import AdamW
from rlkit.ranges import (
    NUMBER,
    FiniteFloat,
    FiniteInt,
    LearningRate,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    ShareBelowOne,
)
from rlkit.schedules import Constant


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
    """The model that is trained: the policy, or a reward model.

    Args:
        path: A name on the Hugging Face hub; `tiny` or `tiny-tools`, which rlkit ships; or a folder: of a model, of an
            adapter, of a run or of one of its checkpoints.
        lora: Train adapters, and the head of a reward model, instead of all weights. Those of an adapter at
            `path` are trained further, and must be of the same shape; without this section they are merged, and all
            weights are trained.
        head: `lm` predicts tokens: a policy. `score` returns a number for a conversation: a reward model, which starts
            with a head of zeros unless there is a sequence classifier with one label at `path`, and is saved as one.
        dtype: The type of weights that are not trained: the base under adapters, and the reference. Weights that are
            trained are float32.
        attention: The implementation of attention, of those in transformers; `auto` is `sdpa` where the model has it,
            else `eager`. Only `sdpa` learns from rows without padding; those of flash attention need their packages, a
            GPU and bf16. TorchEngine has an attention of its own.
        chat_template_kwargs: What the chat template reads besides messages and tools, such as `enable_thinking: false`.
        trust_remote_code: Run code that comes with the model.
    """

    path: str
    lora: Lora | None = None
    head: Literal["lm", "score"] = "lm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    chat_template_kwargs: dict[str, bool | FiniteInt | FiniteFloat | str | None] | None = None
    trust_remote_code: bool = False


@dataclass
class ReferenceUpdates:
    """Updates of the policy that KL is measured against; without them it stays the initial one.

    Args:
        refresh_every: Steps between updates.
        mix: Weight of the policy: reference = mix * policy + (1 - mix) * reference.
    """

    refresh_every: PositiveInt
    mix: PositiveShare = 1.0


@dataclass
class Teacher:
    """A model whose log-probs of the policy's own tokens say how good each is: on-policy distillation.

    coef * (log pi_teacher - log pi) is added to each token's advantage; without an `advantage:` section it is all of it
    (Agarwal et al. 2024, arXiv:2306.13649, with reverse KL; Gu et al. 2024, arXiv:2306.08543). The loss `Distillation`
    compares with its distributions instead, and then nothing is added to advantages.

    Args:
        path: A model as in `model.path`, with the policy's tokenizer. null is the policy itself as the run began,
            or with `train.ema` its averaged weights, which knows more by `context`: self-distillation (Shenfeld et al.
            2026, arXiv:2601.19897).
        urls: SGLang servers that have this model, so that it takes no memory here; `path` says what it is. null loads
            it.
        context: What the teacher reads in place of the last user message of a prompt, a template such as
            `"{prompt}\\nThe answer is {answer}."`: `{prompt}` is that message, `{answer}` the prompt's answer, and any
            other name a column of the row. null for the policy's prompt.
        sources: Models for the prompts of some sources, by the source (a task's name in `Mix`, or the row's
            `data_source`); those of others have `path`, or none, from which nothing is learned, where that is null and
            there is no context. null for one teacher.
        coef: Its weight.
        dtype: The type of its weights.
    """

    path: str | None = None
    urls: list[str] | None = None
    context: str | None = None
    sources: dict[SourceName, str] | None = None
    coef: PositiveFloat = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"

    def path_of(self, source: str) -> str | None:
        """Return the path of the teacher of a source's prompts; None for the policy itself, or for none."""
        return (self.sources or {}).get(source, self.path)

    def paths(self) -> dict[str, str]:
        """Return the paths of all models besides the policy, by the options that name them."""
        named = {} if self.path is None else {"teacher.path": self.path}
        return named | {f"teacher.sources.{source}": path for source, path in (self.sources or {}).items()}


@dataclass
class Critic:
    """Learns the values that GAE needs: a value head on a backbone of its own.

    Args:
        path: The backbone's model, with the policy's tokenizer; null takes the policy's. The values of a reward model
            (`model.head: score`) start as its scores.
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
