"""The recipe: a run's typed parts."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlkit.errors import RecipeError
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.interfaces.callback import Callback
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.loss import Inputs, PolicyLoss, SequenceLoss
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import RunPart
from rlkit.interfaces.task import Curriculum, Task
from rlkit.interfaces.tool import Tool
from rlkit.log import Log
from rlkit.names import Name
from rlkit.sections import (
    ConversationLimits,
    Correction,
    Critic,
    Fabric,
    KLLoss,
    KLReward,
    Mixture,
    Model,
    Profile,
    ReferenceUpdates,
    Rejection,
    Rollout,
    Save,
    Shaping,
    Teacher,
    Train,
    Validation,
)


@dataclass
class Recipe:
    """All of a run."""

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
    conversation: ConversationLimits | None = None
    validation: Validation | None = field(default_factory=Validation)
    save: Save = field(default_factory=Save)
    callbacks: list[Callback] = field(default_factory=list)
    log: Log = field(default_factory=Log)
    profile: Profile | None = None
    fabric: Fabric = field(default_factory=Fabric)

    def parts(self) -> list[RunPart]:
        """Return the parts that may hold something, which is freed at the end of the run."""
        used = (self.rollout.engine, self.reward, self.advantage, self.loss, self.interaction, self.environment)
        read = (self.task, self.curriculum, self.rollout.filter, self.parser, *self.callbacks)
        held_out = {} if self.validation is None else self.validation.tasks or {}
        mixed = [part for one in (self.mix or {}).values() for part in (one.task, one.loss)]
        parts = (*used, *(self.tools or {}).values(), *read, *held_out.values(), *mixed)
        return [part for part in parts if part is not None]

    @property
    def scorer(self) -> RewardManager:
        """The reward.

        Raises:
            RecipeError: There is none.
        """
        if self.reward is None:
            raise RecipeError("the recipe has no `reward:` to score answers with; add one, such as reward: MathReward")
        return self.reward

    @property
    def concurrency(self) -> int | None:
        """How many worker processes the reward wants; None for the default."""
        return None if self.reward is None else self.reward.concurrency

    @property
    def needs(self) -> Needs:
        """What the estimator reads besides rewards and mask."""
        return Needs.NOTHING if self.advantage is None else self.advantage.needs

    @property
    def generates(self) -> bool:
        """Whether the model predicts tokens; a reward model does not, so that its engine is never used."""
        return self.model.head == "lm"

    @property
    def compares_groups(self) -> bool:
        """Whether the answers to a prompt are compared, so that those with equal rewards teach nothing."""
        return Needs.GROUPS in self.needs or (Inputs.GROUPS in self.loss.inputs)

    @property
    def groups_per_step(self) -> int:
        """How many groups a step trains on at most."""
        return self.train.prompts_per_step + (0 if self.rollout.replay is None else self.rollout.replay.size)

    @property
    def needs_ref_logps(self) -> bool:
        """Whether something measures KL of the run's own rows, or their loss compares with the reference."""
        return self.kl_loss is not None or self.kl_reward is not None or (Inputs.REFERENCE in self.loss.inputs)

    @property
    def needs_reference(self) -> bool:
        """Whether a reference is compared with, by the run's own loss or that of a mixture."""
        mixed = [one.loss for one in (self.mix or {}).values() if one.loss is not None]
        return self.needs_ref_logps or any(Inputs.REFERENCE in loss.inputs for loss in mixed)

    @property
    def needs_old_logps(self) -> bool:
        """Whether the trainer's log-probs must be known before learning starts.

        Otherwise those of the first learning pass serve.
        """
        weigh = self.correction is not None and self.train.old_logps == "recompute"
        taught = self.teacher is not None and not self.loss.forward.teacher_top
        wanted = Needs.OLD_LOGPS in self.needs or self.kl_reward or taught or weigh or self.rejection
        weighted = self.kl_loss is not None and self.kl_loss.importance_weighted
        recorded = self.rollout.engine.recorded
        by_token = not (recorded or isinstance(self.loss, SequenceLoss))
        compares = Inputs.OLD_LOGPS in self.loss.inputs or weighted or by_token
        noisy = self.loss.forward.embedding_noise and not recorded
        recompute = compares and not self.train.on_policy and self.train.old_logps == "recompute"
        return bool(wanted or noisy or recompute)


def option(recipe: Recipe, key: str) -> object:
    """Return an option or a section by its key; None if its section is absent."""
    value: object = recipe
    for name in key.split("."):
        value = None if value is None else getattr(value, name)
    return value
