"""The recipe: the sections and parts of a run, and the checks of how they fit together.

What belongs here: sections, which are dataclasses of plain options documented where they are defined; `Recipe`, which
holds them; and `check`, which refuses options that contradict each other. What does not: values of single options,
whose types state their ranges (`rlkit.base.ranges`); parts, which live with their kind; anything that reads data or
loads a model.
"""

from rlkit.recipe.check import check
from rlkit.recipe.check_model import FLASH
from rlkit.recipe.check_validation import VALIDATION_METRICS
from rlkit.recipe.fabric import FSDP2, Environment, Fabric
from rlkit.recipe.model import Attempts, Critic, Lora, Model, ReferenceUpdates, Teacher, Vision
from rlkit.recipe.outputs import Log, Profile, RolloutLog, Save, Validation
from rlkit.recipe.recipe import Recipe
from rlkit.recipe.rollout import ConversationLimits, GroupReplay, Rollout
from rlkit.recipe.train import Correction, KLLoss, KLReward, Mixture, Rejection, Shaping, Train

__all__ = [
    "FLASH",
    "FSDP2",
    "VALIDATION_METRICS",
    "Attempts",
    "ConversationLimits",
    "Correction",
    "Critic",
    "Environment",
    "Fabric",
    "GroupReplay",
    "KLLoss",
    "KLReward",
    "Log",
    "Lora",
    "Mixture",
    "Model",
    "Profile",
    "Recipe",
    "ReferenceUpdates",
    "Rejection",
    "Rollout",
    "RolloutLog",
    "Save",
    "Shaping",
    "Teacher",
    "Train",
    "Validation",
    "Vision",
    "check",
]
