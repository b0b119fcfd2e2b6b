"""The recipe: the sections and parts of a run, and the checks of how they fit together.

What belongs here: sections, which are dataclasses of plain options documented where they are defined; `Recipe`, which
holds them; and `check`, which refuses options that contradict each other. What does not: values of single options,
whose types state their ranges (`rlkit.base.ranges`); parts, which live with their kind; anything that reads data or
loads a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlkit.recipe.check_model import FLASH
    from rlkit.recipe.check_validation import VALIDATION_METRICS
    from rlkit.recipe.checks import check
    from rlkit.recipe.fabric import FSDP2, Environment, Fabric
    from rlkit.recipe.model import Attempts, Critic, Lora, Model, ReferenceUpdates, Teacher, Vision
    from rlkit.recipe.outputs import Log, Profile, RolloutLog, Save, Validation
    from rlkit.recipe.placement import Placement
    from rlkit.recipe.recipe import Recipe
    from rlkit.recipe.rollout import ConversationLimits, GroupReplay, Rollout
    from rlkit.recipe.train import Correction, KLLoss, KLReward, Mixture, Rejection, Shaping, Train

__all__ = [
    "FLASH", "FSDP2", "VALIDATION_METRICS", "Attempts", "ConversationLimits", "Correction", "Critic", "Environment",
    "Fabric", "GroupReplay", "KLLoss", "KLReward", "Log", "Lora", "Mixture", "Model", "Placement", "Profile",
    "Recipe", "ReferenceUpdates", "Rejection", "Rollout", "RolloutLog", "Save", "Shaping", "Teacher", "Train",
    "Validation", "Vision", "check",
]  # fmt: skip

_HOMES = {
    "checks": ("check",),
    "check_model": ("FLASH",),
    "check_validation": ("VALIDATION_METRICS",),
    "fabric": ("FSDP2", "Environment", "Fabric"),
    "model": ("Attempts", "Critic", "Lora", "Model", "ReferenceUpdates", "Teacher", "Vision"),
    "outputs": ("Log", "Profile", "RolloutLog", "Save", "Validation"),
    "placement": ("Placement",),
    "recipe": ("Recipe",),
    "rollout": ("ConversationLimits", "GroupReplay", "Rollout"),
    "train": ("Correction", "KLLoss", "KLReward", "Mixture", "Rejection", "Shaping", "Train"),
}
"""Modules of names that are imported when they are asked for: what reads a recipe as text, such as a report, needs no
torch."""


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"rlkit.recipe.{module}"), name)
    raise AttributeError(f"module 'rlkit.recipe' has no attribute {name!r}")
