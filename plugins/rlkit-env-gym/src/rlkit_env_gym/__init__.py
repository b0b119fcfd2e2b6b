"""gymnasium's text environments, and reasoning-gym's generators with their own scorers."""

from __future__ import annotations

from pathlib import Path

from rlkit.hooks import Register, hookimpl
from rlkit_env_gym.environment import GymTask, GymText
from rlkit_env_gym.reasoning import ReasoningGym, ReasoningGymScore

__all__ = ["GymTask", "GymText", "ReasoningGym", "ReasoningGymScore"]


@hookimpl
def rlkit_register(register: Register) -> None:
    register(GymTask)
    register(GymText)
    register(ReasoningGym)
    register(ReasoningGymScore)


@hookimpl
def rlkit_recipes() -> Path:
    """Return the folder of `quick_lake` and `grpo_reasoning`."""
    return Path(__file__).parent / "recipes"
