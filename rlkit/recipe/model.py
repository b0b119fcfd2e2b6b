"""The policy, its reference, its teacher and its critic."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le

from rlkit.base.files import looks_local
from rlkit.base.names import USER_ONLY, SourceName
from rlkit.base.ranges import (
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
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.optimizers import AdamW
from rlkit.schedules import Constant

Overrides = dict[str, Any]
"""Values of a configuration of transformers by their keys, nested as in `{text_config: {rope_parameters: {...}}}`."""

Quantization = Literal["nf4"]
"""Types of 4 bits in which frozen weights are kept."""


@dataclass
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through peft.

    Args:
        rank: The adapters' rank.
        alpha: The scale of the adapters is alpha / rank.
        targets: `all-linear`, or the names of the modules, or of parameters of experts, that get an adapter.
        use_rslora: Scale the adapters by alpha / sqrt(rank): rsLoRA (Kalajdzievski 2023, arXiv:2312.03732).
        use_dora: Train the magnitude of each row of an adapted weight too: DoRA (Liu et al. 2024, arXiv:2402.09353).
    """

    rank: Annotated[int, Ge(1), Le(4096), NUMBER] = 16
    alpha: PositiveFloat = 32.0
    targets: str | list[str] = "all-linear"
    use_rslora: bool = False
    use_dora: bool = False

    @property
    def scale(self) -> float:
        """The factor of the product of an adapter's matrices."""
        return self.alpha / (sqrt(self.rank) if self.use_rslora else self.rank)

    def __str__(self) -> str:
        scaled = " with rsLoRA's scale" if self.use_rslora else ""
        return f"{'DoRA' if self.use_dora else 'LoRA'} of rank {self.rank}{scaled}"


@dataclass
class Vision:
    """How a vision-language model reads pictures, and whether its vision tower is trained.

    Args:
        min_pixels: Pixels to which smaller pictures are enlarged; null enlarges none.
        max_pixels: Pixels to which larger pictures are shrunk, in the ratio of their sides.
        train: Train the vision tower and its projector too, or give them adapters with `model.lora`.
        sources: Where rows may name pictures besides the folder of their file: folders, hosts such as
            `https://example.com` (also a private one) and buckets such as `s3://name`, or `*` for all public hosts.
    """

    min_pixels: PositiveInt | None = None
    max_pixels: PositiveInt = 1_003_520
    train: bool = False
    sources: Annotated[Sequence[str], USER_ONLY] = ()


@dataclass
class Model:
    """The model that is trained: the policy, or a reward model.

    Args:
        path: A name on the Hugging Face hub; `tiny` or `tiny-tools`, which rlkit ships; or the folder of a model, an
            adapter, a run or a checkpoint.
        lora: Train adapters, and the head of a reward model, instead of all weights. An adapter at `path` is trained
            further, and must have the same shape; without this section it is merged, and all weights are trained.
        head: `lm` predicts tokens: a policy. `score` returns a number for a conversation: a reward model, which starts
            with a head of zeros unless `path` is a sequence classifier with one label, and is saved as one.
        dtype: The type of frozen weights: the base under adapters, and the reference. Trained weights are float32.
        quantization: `nf4` keeps the linear layers of the text model under adapters in 4 bits (QLoRA, Dettmers et al.
            2023, arXiv:2305.14314), by bitsandbytes, and computes in `dtype`. null for none.
        attention: The implementation of attention in transformers; `auto` is `sdpa` if the model has it, else `eager`.
            `auto` trains on rows without padding; flash attention, which does not, needs its package, a GPU and bf16.
            TorchEngine has its own attention.
        config: Values that replace those of the model's `config.json`, merged with its sections, such as
            `rope_parameters: {rope_type: yarn, factor: 4.0}`. They stay in saved models. No key may change which
            weights the model has. `teacher.path` and `critic.path` are read without them.
        vision: How a vision-language model reads pictures; nothing for other models.
        chat_template: A template in Jinja, or the path of a file that holds one, in place of the model's own; saved
            models have it. `plain` writes the contents of messages, each with a line break or, after a turn of the
            policy, the end token: for base models. null for the model's own.
        chat_template_kwargs: Variables of the chat template, such as `enable_thinking: false`.
        trust_remote_code: Run code that comes with the model.
    """

    path: str
    lora: Lora | None = None
    head: Literal["lm", "score"] = "lm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    quantization: Quantization | None = None
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "auto"
    config: Overrides = field(default_factory=dict)
    vision: Vision = field(default_factory=Vision)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, bool | FiniteInt | FiniteFloat | str | None] | None = None
    trust_remote_code: bool = False

    @property
    def scores(self) -> bool:
        """Whether the model is a reward model."""
        return self.head == "score"

    def files(self) -> Iterable[tuple[str, str]]:
        """Return the local files that the model is read from, each with its option."""
        yield from [("path", self.path)] if looks_local(self.path) else ()
        template = self.chat_template or ""
        if "{" not in template and template.endswith((".jinja", ".j2", ".txt")):
            yield "chat_template", template

    def at(self, path: str | None, lora: Lora | None = None) -> Model:
        """Return the model at another path, with other adapters, not quantized; None is this model, with `config`."""
        return replace(self, path=path or self.path, lora=lora, config={} if path else self.config, quantization=None)


@dataclass
class ReferenceUpdates:
    """Updates of the reference that KL is measured against; without them it stays the initial policy.

    Args:
        refresh_every: Steps between updates.
        mix: Weight of the policy: reference = mix * policy + (1 - mix) * reference.
    """

    refresh_every: PositiveInt
    mix: PositiveShare = 1.0


@dataclass
class Attempts:
    """What a teacher reads of the step's own samples: SDPO (Hübotter et al. 2026, arXiv:2601.20802).

    Samples of which it reads neither a solution nor feedback have no signal.

    Args:
        success: The least reward of a solution.
        solution: `{solution}` in `teacher.context`, a template of `{text}`: the last turn of the best other sample of
            the prompt, if it is a solution. null for none.
        feedback: `{feedback}` in `teacher.context`, a template of `{text}`: what the reward says of the sample, if it
            says anything. null for none.
    """

    success: FiniteFloat = 1.0
    solution: str | None = "\n\nCorrect solution:\n\n{text}"
    feedback: str | None = "\n\nFeedback on an earlier attempt:\n\n{text}"


@dataclass
class Teacher:
    """A model whose log-probs of the policy's own tokens score each of them: on-policy distillation.

    coef * (log pi_teacher - log pi) is added to each token's advantage; without an `advantage:` section it is the
    advantage (Agarwal et al. 2024, arXiv:2306.13649, with reverse KL; Gu et al. 2024, arXiv:2306.08543). The loss
    `Distillation` compares distributions instead, and nothing is added to advantages.

    Args:
        path: A model as in `model.path`, with the policy's tokenizer unless `retokenize` is set. null is the initial
            policy, or with `train.ema` its averaged weights, which reads more in `context`: self-distillation
            (Shenfeld et al. 2026, arXiv:2601.19897).
        urls: Servers of this model, which then takes no memory here; `path` names the model. null loads it.
        engine: The engine whose product serves `urls`, such as `VllmServer`; its options are not read. null for SGLang.
        context: A template that the teacher reads in place of the last user message of a prompt, such as
            `"{prompt}\\nThe answer is {answer}."`: `{prompt}` is that message, `{answer}` the reference answer, and any
            other name a column of the row. null for the policy's prompt, or with `attempts` for the paper's template.
        attempts: What the teacher reads of the step's samples: SDPO. null for nothing.
        retokenize: Whether the teacher reads the conversation's text with its own tokenizer and chat template, or that
            of `model.chat_template`: cross-tokenizer distillation (GOLD, Patiño et al. 2025). Log-probs are then those
            of the shortest texts at whose ends both models' tokens end.
        sources: Models for the prompts of single sources, by the source (a task's name in `Mix`, or the row's
            `data_source`); prompts of other sources have `path`, or no teacher and no signal if `path` and `context`
            are null. null for a single teacher.
        coef: The weight of the teacher's signal.
        dtype: The type of the teacher's weights.
    """

    path: str | None = None
    urls: list[str] | None = None
    engine: RolloutEngine | None = None
    context: str | None = None
    attempts: Attempts | None = None
    retokenize: bool = False
    sources: dict[SourceName, str] | None = None
    coef: PositiveFloat = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"

    @property
    def template(self) -> str | None:
        """What the teacher reads in place of the last user message of a prompt; None for the same."""
        if self.context is None and self.attempts is not None:
            return "{prompt}{solution}{feedback}\n\nCorrectly solve the original question."
        return self.context

    def files(self) -> Iterable[tuple[str, str]]:
        """Return the local models of the section, each with its option."""
        return [(name.removeprefix("teacher."), path) for name, path in self.paths().items() if looks_local(path)]

    def path_of(self, source: str) -> str | None:
        """Return the path of the teacher for prompts of a source; None for the policy itself, or for no teacher."""
        return (self.sources or {}).get(source, self.path)

    def paths(self) -> dict[str, str]:
        """Return the paths of the teachers, by the options that name them."""
        paths = {} if self.path is None else {"teacher.path": self.path}
        return paths | {f"teacher.sources.{source}": path for source, path in (self.sources or {}).items()}


@dataclass
class Critic:
    """The model of values that GAE needs: a value head on its own backbone.

    Args:
        path: The backbone, with the policy's tokenizer; null for the policy's model. The values of a reward model
            (`model.head: score`) start as its scores.
        lora: Train adapters of the backbone, and the head, instead of all weights.
        lr: The peak learning rate.
        optimizer: The optimizer, with its hyperparameters.
        weight_decay: The weight decay of matrices; other parameters have none.
        schedule: The learning rate after the warm-up.
        warmup_steps: Rollout steps in which the learning rate rises from 0.
        warmup_ratio: The same as a share of all steps, rounded up; null for `warmup_steps`.
        max_grad_norm: The norm to which gradients are clipped.
        clip: The change of a value beyond which its loss is clipped; null for no clipping.
        policy_delay_steps: Steps at the start that train only the critic.
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

    def files(self) -> Iterable[tuple[str, str]]:
        """Return the local model of the section, with its option."""
        return [("path", self.path)] if self.path is not None and looks_local(self.path) else []
