"""The recipe: a run's typed parts, and the relations between them that must hold before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlkit.errors import RecipeError
from rlkit.ops.aggregate import Aggregation
from rlkit.ops.kl import KLKind
from rlkit.roles.advantage import AdvantageEstimator, Needs
from rlkit.roles.engine import RolloutEngine
from rlkit.roles.loss import PolicyLoss
from rlkit.roles.reward import RewardManager
from rlkit.roles.task import Task
from rlkit.types import Sampling

Schedule = Literal["constant", "linear", "cosine"]
"""How the learning rate goes on after the warm-up."""


@dataclass
class Lora:
    """Low-rank adapters (Hu et al. 2021, arXiv:2106.09685), through peft.

    Args:
        rank: The adapters' rank.
        alpha: Their scale is alpha / rank.
        targets: `all-linear`, or the names of the modules that get one.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: str | list[str] = "all-linear"


@dataclass
class Model:
    """The policy.

    Args:
        path: A name on the Hugging Face hub, a folder, or `tiny`, the model that rlkit ships.
        lora: Train adapters instead of all weights.
        trust_remote_code: Run code that comes with the model.
    """

    path: str
    lora: Lora | None = None
    trust_remote_code: bool = False


@dataclass
class Rollout:
    """How trajectories are made.

    Args:
        engine: Where tokens are sampled.
        group: Samples of each prompt.
        sampling: How tokens are chosen while training.
        skip_long_prompts: Leave out prompts that do not fit the context, instead of refusing the run.
    """

    engine: RolloutEngine
    group: int = 8
    sampling: Sampling = field(default_factory=Sampling)
    skip_long_prompts: bool = False


@dataclass
class Train:
    """The training loop.

    Args:
        steps: Rollout steps of the run.
        prompts_per_step: Prompts of a step, over all ranks.
        minibatches: Optimizer steps an epoch over a rollout.
        epochs: Passes over a rollout.
        micro_tokens: Tokens of one forward and backward pass, padding included.
        lr: AdamW's largest learning rate.
        weight_decay: AdamW's, for matrices only.
        schedule: How the learning rate goes on after the warm-up.
        warmup_steps: Rollout steps in which it rises from 0.
        max_norm: The gradient's norm is clipped to this.
        entropy_coef: Adds the policy's entropy to what is maximised.
        aggregation: How tokens and sequences count; null takes the loss's own.
        seed: Of the data's order and of every sampled token.
    """

    steps: int
    prompts_per_step: int = 32
    minibatches: int = 1
    epochs: int = 1
    micro_tokens: int = 16384
    lr: float = 1e-6
    weight_decay: float = 0.0
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    max_norm: float = 1.0
    entropy_coef: float = 0.0
    aggregation: Aggregation | None = None
    seed: int = 0

    @property
    def on_policy(self) -> bool:
        """Whether a rollout makes one optimizer step, so that the old policy is the one that learns."""
        return self.minibatches * self.epochs == 1


@dataclass
class Validation:
    """Held-out prompts, answered greedily and by sampling.

    Args:
        every: Validate after every so many steps too; 0 only before and after training.
        limit: Prompts, from the start of the split.
        samples: Sampled answers of each prompt, besides the greedy one; 0 for none.
        sampling: How they are sampled; null takes the training's.
    """

    every: int = 0
    limit: int = 200
    samples: int = 1
    sampling: Sampling | None = None


@dataclass
class KLLoss:
    """Adds coef * KL(policy || reference), estimated token by token, to the loss.

    Args:
        coef: Its weight.
        kind: The estimate; see `rlkit.ops.kl`.
    """

    coef: float = 0.001
    kind: KLKind = "k3"


@dataclass
class Wandb:
    """Weights & Biases.

    Args:
        project: The project.
        name: The run's name; null takes the run folder's.
        offline: Write to the run folder only.
    """

    project: str
    name: str | None = None
    offline: bool = False


@dataclass
class Log:
    """Where metrics go besides the run folder.

    Args:
        wandb: Weights & Biases.
    """

    wandb: Wandb | None = None


@dataclass
class Recipe:
    """All of a run."""

    model: Model
    task: Task
    rollout: Rollout
    reward: RewardManager
    advantage: AdvantageEstimator
    loss: PolicyLoss
    train: Train
    kl_loss: KLLoss | None = None
    validation: Validation = field(default_factory=Validation)
    log: Log = field(default_factory=Log)
    fabric: dict[str, Any] = field(default_factory=dict)


ROLE_OF_KEY = {
    "task": "tasks",
    "reward": "rewards",
    "advantage": "advantages",
    "loss": "losses",
    "rollout.engine": "engines",
}
"""Which role's classes a key of the recipe may name."""


def check(recipe: Recipe) -> None:
    """Check all that can be known without reading data or loading a model.

    Raises:
        RecipeError: Something does not fit; the message has a line for each thing, with the remedy.
    """
    problems = [*_check_needs(recipe), *_check_numbers(recipe), *_check_model(recipe)]
    if problems:
        raise RecipeError("\n".join(problems))


def _check_needs(recipe: Recipe) -> Iterator[str]:
    advantage = type(recipe.advantage).__name__
    if Needs.GROUPS in recipe.advantage.needs and recipe.rollout.group < 2:
        yield (
            f"advantage {advantage} compares the samples of a prompt, but rollout.group is {recipe.rollout.group}; "
            "set rollout.group to 2 or more (usual: 8)"
        )
    sampling = recipe.rollout.sampling
    if sampling.truncates:
        yield (
            f"rollout.sampling has top_p={sampling.top_p} and top_k={sampling.top_k}, whose log-probs the trainer "
            "cannot match; set top_p: 1 and top_k: 0, and truncate in validation.sampling only"
        )
    if sampling.temperature == 0:
        yield "rollout.sampling.temperature is 0, so all samples of a prompt would be equal; set it above 0 (usual: 1)"
    precision = str(recipe.fabric.get("precision") or "")
    if precision.endswith("-true") and not precision.startswith(("32", "64")):
        yield (
            f"fabric.precision is {precision!r}, in which most of AdamW's small updates round away; "
            f"set fabric.precision to '{precision[: -len('-true')]}-mixed'"
        )


def _check_numbers(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    at_least_one = {
        "rollout.group": recipe.rollout.group,
        "train.steps": train.steps,
        "train.prompts_per_step": train.prompts_per_step,
        "train.minibatches": train.minibatches,
        "train.epochs": train.epochs,
        "train.micro_tokens": train.micro_tokens,
        "validation.limit": recipe.validation.limit,
    }
    not_negative: dict[str, float] = {
        "train.weight_decay": train.weight_decay,
        "train.warmup_steps": train.warmup_steps,
        "validation.every": recipe.validation.every,
        "validation.samples": recipe.validation.samples,
    }
    positive: dict[str, float] = {"train.lr": train.lr, "train.max_norm": train.max_norm}
    if recipe.kl_loss is not None:
        positive["kl_loss.coef"] = recipe.kl_loss.coef
    if recipe.model.lora is not None:
        positive |= {"model.lora.rank": recipe.model.lora.rank, "model.lora.alpha": recipe.model.lora.alpha}
    yield from (f"{key} is {value}, expected 1 or more" for key, value in at_least_one.items() if value < 1)
    yield from (f"{key} is {value}, expected 0 or more" for key, value in not_negative.items() if value < 0)
    yield from (f"{key} is {value}, expected more than 0" for key, value in positive.items() if not value > 0)
    if train.minibatches > train.prompts_per_step:
        yield (
            f"train.minibatches is {train.minibatches}, but a step has only train.prompts_per_step = "
            f"{train.prompts_per_step} prompts and a group is never divided; set it to {train.prompts_per_step} or less"
        )


def _check_model(recipe: Recipe) -> Iterator[str]:
    path = recipe.model.path
    looks_local = path.startswith((".", "/", "~")) or path.count("/") > 1
    if looks_local and not Path(path).expanduser().is_dir():
        yield f"model.path is {path!r}, which is no folder; give a folder with a config.json, a hub name, or `tiny`"
