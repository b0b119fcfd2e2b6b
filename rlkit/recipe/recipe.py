"""The recipe: the typed sections and parts of a run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property

from rlkit.base.errors import RecipeError
from rlkit.base.names import Name
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.interfaces.agent import Agent
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.engine import Capability, RolloutEngine
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.fields import Field
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.launcher import Launcher
from rlkit.interfaces.loss import Inputs, PolicyLoss, SequenceLoss
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import RunPart
from rlkit.interfaces.task import Curriculum, Task
from rlkit.interfaces.tool import Tool
from rlkit.recipe.fabric import Fabric
from rlkit.recipe.method import Method, NoEngine, ReinforcementLearning, RewardModelling, Supervised
from rlkit.recipe.model import Critic, Model, ReferenceUpdates, Teacher
from rlkit.recipe.outputs import Log, Profile, Save, Validation
from rlkit.recipe.placement import Placement
from rlkit.recipe.rollout import ConversationLimits, Rollout
from rlkit.recipe.train import Correction, KLLoss, KLReward, Mixture, Rejection, Shaping, Train


@dataclass
class Recipe:
    """The sections and parts of a run."""

    model: Model
    task: Task
    rollout: Rollout
    loss: PolicyLoss
    train: Train
    reward: RewardManager | None = None
    advantage: AdvantageEstimator | None = None
    curriculum: Curriculum | None = None
    critic: Critic | None = None
    kl_loss: KLLoss | None = None
    kl_reward: KLReward | None = None
    reference: ReferenceUpdates | None = None
    teacher: Teacher | None = None
    mix: dict[Name, Mixture] | None = None
    shaping: Shaping | None = None
    correction: Correction | None = None
    rejection: Rejection | None = None
    tools: dict[Name, Tool] | None = None
    parser: ToolParser | None = None
    interaction: Interaction | None = None
    environment: Environment | None = None
    agent: Agent | None = None
    conversation: ConversationLimits | None = None
    validation: Validation | None = field(default_factory=Validation)
    save: Save = field(default_factory=Save)
    callbacks: list[Callback] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    profile: Profile | None = None
    fabric: Fabric = field(default_factory=Fabric)
    launcher: Launcher | None = None
    placement: Placement | None = None

    @cached_property
    def method(self) -> Method:
        """The way in which the recipe trains."""
        if Capability.VALIDATION_ONLY not in self.rollout.engine.capabilities:
            return ReinforcementLearning()
        return RewardModelling() if self.model.scores else Supervised()

    @property
    def engine(self) -> RolloutEngine:
        """The engine that samples, in steps or in validation."""
        return NoEngine() if self.model.scores else self.rollout.engine

    def parts(self) -> list[RunPart]:
        """Return all parts, to be closed at the end of the run."""
        training = (self.engine, self.reward, self.advantage, self.loss, self.interaction, self.environment)
        data = (self.task, self.curriculum, self.rollout.filter, self.parser, *self.callbacks)
        validation_tasks = {} if self.validation is None else self.validation.tasks or {}
        mixtures = [part for mixture in (self.mix or {}).values() for part in (mixture.task, mixture.loss)]
        parts = (*training, *(self.tools or {}).values(), *data, *validation_tasks.values(), *mixtures)
        return [part for part in (*parts, self.agent, self.launcher) if part is not None]

    @property
    def sampled_fields(self) -> dict[str, Field]:
        """The fields that rollouts fill before they are scored, by name."""
        participants = (self.interaction, self.environment, self.agent, *(self.tools or {}).values())
        return {spec.name: spec for part in (self.engine, *participants) if part is not None for spec in part.fills}

    @property
    def scored_fields(self) -> dict[str, Field]:
        """The fields that the reward fills, by name."""
        return {} if self.reward is None else {spec.name: spec for spec in self.reward.fills}

    @property
    def placed(self) -> Collection[str]:
        """The roles whose models are in pools."""
        return () if self.placement is None else self.placement.roles.keys()

    @property
    def scorer(self) -> RewardManager:
        """The reward.

        Raises:
            RecipeError: The recipe has no reward.
        """
        if self.reward is None:
            raise RecipeError(
                "the recipe has no `reward:` to score completions with; add one, such as reward: MathReward"
            )
        return self.reward

    @property
    def trial_reward(self) -> RewardManager | None:
        """The reward, if it can be tried on reference answers; after an agent it may read what that left behind."""
        return None if self.agent is not None else self.reward

    @property
    def concurrency(self) -> int | None:
        """The number of worker processes that the reward asks for; None for the default."""
        return None if self.reward is None else self.reward.concurrency

    @property
    def needs(self) -> Needs:
        """The inputs of the estimator besides rewards and mask."""
        return Needs.NOTHING if self.advantage is None else self.advantage.needs

    @property
    def compares_groups(self) -> bool:
        """Whether the completions of a prompt are compared, so that groups of equal rewards have no signal."""
        return Needs.GROUPS in self.needs or (Inputs.GROUPS in self.loss.inputs)

    @property
    def groups_per_step(self) -> int:
        """The largest number of groups that a step trains on."""
        return self.train.prompts_per_step + (0 if self.rollout.replay is None else self.rollout.replay.size)

    @property
    def samples_validation(self) -> bool:
        """Whether validation samples completions, which the reward scores."""
        return self.validation is not None and self.reward is not None and not self.model.scores

    @property
    def measures_losses_alone(self) -> bool:
        """Whether validation measures nothing but the losses of recorded completions."""
        return self.validation is not None and not self.samples_validation and not self.model.scores

    @property
    def needs_ref_logps(self) -> bool:
        """Whether KL of the run's own rows is measured, or their loss reads the reference."""
        return self.kl_loss is not None or self.kl_reward is not None or (Inputs.REFERENCE in self.loss.inputs)

    @property
    def needs_reference(self) -> bool:
        """Whether the run's own loss, or that of a mixture, reads the reference."""
        losses = [mixture.loss for mixture in (self.mix or {}).values() if mixture.loss is not None]
        return self.needs_ref_logps or any(Inputs.REFERENCE in loss.inputs for loss in losses)

    @property
    def trains_bfloat16(self) -> bool:
        """Whether trained weights are in bfloat16: with `bf16-true`, unless all that is trained are adapters."""
        adapters_alone = self.model.lora is not None and (self.critic is None or self.critic.lora is not None)
        return self.fabric.precision == "bf16-true" and not adapters_alone

    @property
    def needs_old_logps(self) -> bool:
        """Whether the trainer's log-probs are needed before the update.

        Otherwise those of the first forward pass of the update are used.
        """
        corrects = self.correction is not None and self.train.old_logps == "recompute"
        is_distilled = self.teacher is not None and not self.loss.forward.teacher_top
        is_read = Needs.OLD_LOGPS in self.needs or self.kl_reward or is_distilled or corrects or self.rejection
        weighted = self.kl_loss is not None and self.kl_loss.importance_weighted
        samples = self.method.samples
        are_measured = samples and not isinstance(self.loss, SequenceLoss)
        compares = Inputs.OLD_LOGPS in self.loss.inputs or weighted or are_measured
        is_noisy = samples and self.loss.forward.embedding_noise
        recompute = compares and not self.train.on_policy and self.train.old_logps == "recompute"
        return bool(is_read or is_noisy or recompute)


def option(recipe: Recipe, key: str) -> object:
    """Return the value of an option or a section by its dotted key; None if its section is absent."""
    value: object = recipe
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value
