"""The sections of a recipe: dataclasses of plain options, documented where they are defined.

A field's type states its range, once; a field's entry under `Args` is its help. What can be exchanged for a plugin's
class is no section but a part, and lives in the room of its kind. Nothing here computes anything.
"""

from rlkit.sections.fabric import FSDP2, Environment, Fabric
from rlkit.sections.mixture import Mixture
from rlkit.sections.model import Critic, Lora, Model, ReferenceUpdates, Teacher
from rlkit.sections.profile import Profile
from rlkit.sections.rollout import ConversationLimits, GroupReplay, Rollout
from rlkit.sections.save import Save, Validation
from rlkit.sections.train import Correction, KLLoss, KLReward, Rejection, Shaping, Train

__all__ = [
    "ConversationLimits",
    "Correction",
    "Critic",
    "Environment",
    "FSDP2",
    "Fabric",
    "KLLoss",
    "KLReward",
    "Lora",
    "Mixture",
    "Model",
    "Profile",
    "ReferenceUpdates",
    "Rejection",
    "GroupReplay",
    "Rollout",
    "Save",
    "Shaping",
    "Teacher",
    "Train",
    "Validation",
]
