"""LengthReward in numbers worked by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import rlkit_length_reward
from rlkit_length_reward import LengthReward

from rlkit.registry import load_plugins
from rlkit.rewards import ExactReward
from rlkit.testing import check_reward, example_trajectory
from rlkit.types import Score


async def here(reward, trajectories):
    """Score without workers."""
    return await reward.score(trajectories)


def bound(**options) -> LengthReward:
    reward = LengthReward(ExactReward(), **options)
    reward.bind(SimpleNamespace(score=here))
    return reward


def test_each_token_beyond_the_free_ones_costs() -> None:
    # example trajectories have a token a character: "4" is free, "4   " has two tokens too many
    scores = check_reward(bound(free_tokens=2, penalty=0.1), ["4", "4   ", "five"])
    assert [s.reward for s in scores] == pytest.approx([1.0, 0.8, -0.2])
    assert [s.components["length_penalty"] for s in scores] == pytest.approx([0.0, -0.2, -0.2])
    assert [s.components["accuracy"] for s in scores] == [1, 1, 0]


def test_the_floor_bounds_what_is_taken_off() -> None:
    [score] = check_reward(bound(free_tokens=0, penalty=1.0, floor=-0.25), ["4" * 9])
    assert score.reward == -0.25


def test_the_rewards_own_limits_and_counts_hold() -> None:
    class Costly(ExactReward):
        concurrency = 3

        def counts(self):
            return {"calls": 7.0}

        def unscorable(self, prompt):
            return f"no reference in {prompt.id}"

    reward = LengthReward(Costly())
    prompt = example_trajectory("4").prompt
    assert (reward.concurrency, reward.counts()) == (3, {"calls": 7.0})
    assert reward.unscorable(prompt) == f"no reference in {prompt.id}"


def test_a_failed_score_stays_failed() -> None:
    async def failing(reward, trajectories):
        return [Score(None, error="away")]

    reward = bound()
    reward.bind(SimpleNamespace(score=failing))
    [score] = asyncio.run(reward.score([example_trajectory("4")]))
    assert (score.reward, score.error) == (None, "away")


def test_it_registers() -> None:
    registry = load_plugins([("length-reward", rlkit_length_reward)], entry_points=False)
    registry.require_healthy()
    assert registry.parts["rewards"]["LengthReward"].cls is LengthReward
