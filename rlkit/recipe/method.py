"""The ways to train: what differs between them before a model is loaded. `rlkit.run.method` has their steps.

`Recipe.method` is resolved once; code asks it for what it needs, and not which one it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

from rlkit.base.errors import EngineError
from rlkit.interfaces.advantage import Needs
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.loss import Inputs
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import Runtime, WeightStream
from rlkit.types import Completion, Request

if TYPE_CHECKING:
    from rlkit.recipe.recipe import Recipe

SAMPLED = (
    "teacher", "kl_reward", "correction", "rejection", "shaping", "tools", "interaction", "environment", "conversation",
)  # fmt: skip
"""Sections that concern sampled completions."""


class Method(ABC):
    """A way to train."""

    samples: ClassVar[bool]
    """Whether an engine samples the completions of steps; otherwise rows of the data have them."""

    trained: ClassVar[str] = "policy"
    """The name of the model that is trained."""

    completions: ClassVar[str]
    """A phrase for the completions of a prompt; `details` are those of sampled ones."""

    equal_rewards: ClassVar[str]
    """The remedy for groups of equal rewards; `remedy` is that of sampled ones."""

    validation_metrics: ClassVar[tuple[str, ...]] = ()
    """Metrics of validation besides those of scored completions."""

    @abstractmethod
    def problems(self, recipe: Recipe) -> Iterator[str]:
        """Yield the problems of options that do not fit the method."""

    def training_reward(self, recipe: Recipe) -> RewardManager | None:
        """Return the reward of the completions of steps; None if nothing scores them."""
        return recipe.reward if self.samples else None


class ReinforcementLearning(Method):
    """An engine samples the completions of steps, and a reward or a teacher scores them."""

    samples = True
    completions = "x {rollout.group_size} samples{details}"
    equal_rewards = "{remedy}"

    def problems(self, recipe: Recipe) -> Iterator[str]:
        loss, group_size = recipe.loss, recipe.rollout.group_size
        name, is_distilled = type(loss).__name__, recipe.teacher is not None and recipe.advantage is None
        if recipe.reward is None and Inputs.REWARDS in loss.inputs and not is_distilled:
            yield f"loss {name} reads rewards, but the recipe has no `reward:`; add one, such as reward: MathReward"
        if recipe.reward is None and recipe.validation is not None:
            yield "validation scores completions, but the recipe has no `reward:`; add one, or set validation: null"
        if recipe.model.scores:
            yield (
                "model.head is 'score': a reward model, which predicts no tokens, but rollout.engine "
                f"{type(recipe.rollout.engine).__name__} samples them; set rollout.engine: Recorded"
            )
        single = f"compares the samples of a prompt, but rollout.group_size is {group_size}; set rollout.group_size"
        if Needs.GROUPS in recipe.needs and group_size < 2:
            yield f"advantage {type(recipe.advantage).__name__} {single} to 2 or more (usual: 8)"
        if Inputs.GROUPS in loss.inputs and group_size < 2:
            yield f"loss {name} {single} to 2 or more"
        replies = recipe.tools or recipe.interaction or recipe.environment
        for key in [key for key, mixture in (recipe.mix or {}).items() if mixture.task is None and not replies]:
            yield (
                f"mix.{key} has no task, so it trains on the replies of tools, users and environments, but the recipe "
                f"has none of these; add mix.{key}.task"
            )


class Supervised(Method):
    """Rows of the data have the completions: fine-tuning, preferences, distillation on recorded ones."""

    samples = False
    completions = "with their recorded answers"
    equal_rewards = "remove prompts whose answers have equal rewards from the data"
    validation_metrics = ("loss", "margin", "preference_accuracy")

    def problems(self, recipe: Recipe) -> Iterator[str]:
        rollout, train, temperature = recipe.rollout, recipe.train, recipe.rollout.sampling.temperature
        recorded = "rollout.engine is Recorded, whose completions no policy has sampled, but"
        for section in SAMPLED:
            if getattr(recipe, section) and not (section == "teacher" and recipe.loss.forward.teacher_top):
                yield f"{recorded} the recipe has a section `{section}:`; remove it"
        if rollout.filter is not None:
            yield f"{recorded} the recipe has a rollout.filter; remove it"
        if train.old_logps != "recompute":
            yield f"{recorded} train.old_logps is {train.old_logps}; set it to recompute"
        if train.mask_truncated:
            yield f"{recorded} train.mask_truncated is true; remove it"
        if temperature != 1:
            yield f"{recorded} rollout.sampling.temperature is {temperature}; set validation.sampling instead"
        if rollout.oversample > 1:
            yield f"{recorded} rollout.oversample is {rollout.oversample}; set it to 1"
        if recipe.loss.reads_fields:
            name, field = type(recipe.loss).__name__, recipe.loss.reads_fields[0]
            yield f"{recorded} loss {name} reads the field {field!r}, which rollouts fill; choose another loss"


class RewardModelling(Supervised):
    """The same for a model that scores conversations. Its validation scores recorded ones: nothing is sampled."""

    trained = "reward model"


class NoEngine(RolloutEngine):
    """The engine of a run that samples nothing: it takes no weights."""

    needs_weights = True

    def bind(self, runtime: Runtime) -> None:
        """Do nothing."""

    async def generate(self, request: Request) -> Completion:
        raise EngineError("a reward model predicts no tokens")

    async def sync(self, stream: WeightStream, version: int) -> None:
        """Do nothing."""
