"""The rewards that an environment of verifiers has given a rollout."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rlkit.base.errors import shorten
from rlkit.base.ranges import Seconds
from rlkit.interfaces.reward import OnError, RewardFunction
from rlkit.types import Prompt, Score, Trajectory
from rlkit_env_verifiers.agent import OUTCOME


class VerifiersReward(RewardFunction):
    """The weighted sum of an environment's rewards; each of them, and each of its metrics, is a component.

    `accuracy` is the environment's own if it has one of this name, else 1 if every reward of positive weight is 1 or
    more. An episode that failed in the environment's code has no score, so that its group is left out.

    Args:
        accuracy: The reward or metric that is 1 for a right answer; null for the rule above.
        timeout: Seconds for one trajectory.
        on_error: What happens to a group with a failed score.
    """

    def __init__(self, accuracy: str | None = None, timeout: Seconds = 10.0, on_error: OnError = "drop") -> None:
        self.accuracy = accuracy
        self.timeout = timeout
        self.on_error = on_error

    def grade(self, trajectory: Trajectory) -> Score:
        agent = trajectory.agent
        path = Path(agent.get("folder", "")) / OUTCOME
        if "folder" not in agent or not os.path.isfile(path):
            problem = shorten(str(agent.get("output") or "no VerifiersAgent has played it"), 500)
            return Score(None, error=f"the environment has not scored the rollout: {problem}")
        scores = json.loads(path.read_text(encoding="utf-8"))
        rewards = scores["rewards"].values()
        components = {**scores["metrics"], **{name: score for name, (score, _) in scores["rewards"].items()}}
        accuracy = self.accuracy or "accuracy"
        if accuracy in components:
            components["accuracy"] = components[accuracy]
        elif self.accuracy is not None:
            names = ", ".join(sorted(components))
            return Score(None, error=f"VerifiersReward has accuracy={accuracy!r}, but the environment has {names}")
        else:
            components["accuracy"] = float(all(score >= 1 for score, weight in rewards if weight > 0))
        return Score(sum(score * weight for score, weight in rewards), components, answer=trajectory.text)

    def unscorable(self, prompt: Prompt) -> str | None:
        return None if "environment" in prompt.meta else "is of no environment of verifiers; use `task: VerifiersTask`"
