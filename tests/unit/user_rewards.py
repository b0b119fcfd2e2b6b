"""Rewards as users write them; workers import this module, so it imports nothing heavy."""

from __future__ import annotations

from typing import Any

from rlkit.interfaces.reward import RewardFunction
from rlkit.types import Trajectory

BONUS = 0.25


def right(text: str, answer: str) -> dict[str, float]:
    return {"reward": float(answer in text) + BONUS, "accuracy": float(answer in text)}


async def awaited(text: str, answer: str) -> float:
    return float(answer in text)


def trl_style(completions: list[list[dict[str, str]]], answer: list[str], **columns: Any) -> list[float]:
    return [float(a in c[-1]["content"]) for c, a in zip(completions, answer, strict=True)]


class Own(RewardFunction):
    """A reward that no plugin registers."""

    def grade(self, trajectory: Trajectory) -> float:
        return float(len(trajectory.text))
