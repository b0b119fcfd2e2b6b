"""Calling rewards: their errors become scores with an error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rlkit.base.deadlines import paused
from rlkit.base.errors import RolloutError, show, with_definition
from rlkit.base.tasks import run_concurrently
from rlkit.base.text import part_name
from rlkit.interfaces.fields import tensors_of
from rlkit.interfaces.reward import (
    RewardFunction,
    RewardManager,
    as_number,
    as_score,
    grade_as_data,
    grade_control,
    scoring_method,
)
from rlkit.registry import calling
from rlkit.rollout.guard import GuardError, guard
from rlkit.rollout.workers import WorkerError, Workers
from rlkit.types import Score, Trajectory


class RewardCounts:
    """Reads the totals of a reward, step by step.

    Args:
        reward: The recipe's, if it has one.
    """

    def __init__(self, reward: RewardManager | None) -> None:
        self._reward = reward
        self._totals: dict[str, float] = {}

    def growth(self) -> dict[str, float]:
        """Return the growth of each total since the last call.

        Raises:
            PartError: A plugin's reward raised, or a total is no number.
        """
        if self._reward is None:
            return {}
        with calling(self._reward, "counts"):
            totals = {str(name): as_number(total) for name, total in dict(self._reward.counts()).items()}
        growth = {name: total - self._totals.get(name, 0.0) for name, total in totals.items()}
        self._totals = totals
        return growth


async def score(reward: RewardManager, trajectories: Sequence[Trajectory], workers: Workers) -> list[Score]:
    """Return one score per trajectory; a failure has its error.

    Raises:
        RolloutError: The reward failed and its `on_error` is `raise`.
    """
    with paused():  # of a reward that combines others: each has its own deadline
        scores = await _attempt(reward, trajectories, workers)
        failed = [i for i, s in enumerate(scores) if s.error is not None]
        if failed and reward.on_error == "retry":
            again = await _attempt(reward, [trajectories[i] for i in failed], workers)
            for i, second in zip(failed, again, strict=True):
                scores[i] = second
            failed = [i for i in failed if scores[i].error is not None]
    if failed and reward.on_error == "raise":
        first = failed[0]
        raise RolloutError(
            f"the reward failed on prompt {trajectories[first].prompt.id!r}: {scores[first].error}; "
            "its on_error is 'raise' (choose 'drop' to leave such groups out and count them)"
        )
    return scores


async def _attempt(reward: RewardManager, trajectories: Sequence[Trajectory], workers: Workers) -> list[Score]:
    """Call a reward once; it fails where its values are not those of the conversation's tokens or turns."""
    if isinstance(reward, RewardFunction):
        scores = await _grade(reward, trajectories, workers)
    else:
        scores = await _call(reward, trajectories)
    return [_fitted(reward, *pair) for pair in zip(trajectories, scores, strict=True)]


def _fitted(reward: RewardManager, trajectory: Trajectory, score: Score) -> Score:
    """Return a score with tensors as fields; an error if a number of its values is not that of the conversation."""
    chosen, turns = trajectory.response_length, sum(turn.role == "assistant" for turn in trajectory.turns)
    if score.turn_rewards is not None and len(score.turn_rewards) != turns:
        problem = f"returned {len(score.turn_rewards)} turn_rewards, expected {turns}: one for each turn of the policy"
        return _failure(reward, problem)
    if score.token_rewards is not None and len(score.token_rewards) != chosen:
        expected = f"expected {chosen}: one for each token that the policy chose"
        return _failure(reward, f"returned {len(score.token_rewards)} token_rewards, {expected}")
    if not score.fields:
        return score
    try:
        method = scoring_method(reward)
        return replace(score, fields=tensors_of(reward, method, score.fields, mask=trajectory.mask, turns=turns))
    except ValueError as error:
        return _failure(reward, str(error))


async def _call(reward: RewardManager, trajectories: Sequence[Trajectory]) -> list[Score]:
    async def listed() -> list[Score]:
        return list(await reward.score(trajectories))

    try:
        scores = await guard(listed, reward, method="score")
    except GuardError as error:
        return [Score(None, error=str(error))] * len(trajectories)
    if len(scores) != len(trajectories):
        problem = f"returned {len(scores)} scores for {len(trajectories)} trajectories"
        return [_failure(reward, problem)] * len(trajectories)
    return [as_score(s, reward) for s in scores]


async def _grade(reward: RewardFunction, trajectories: Sequence[Trajectory], workers: Workers) -> list[Score]:
    """Grade at once what the reward can, and the rest in workers."""
    scores: list[Score | None] = []
    for trajectory in trajectories:
        try:
            score = reward.grade_at_once(trajectory)
        except Exception:  # a worker's to report
            score = None
        scores.append(None if score is None else as_score(score, reward))
    sent = [_for_worker(reward, t) for t, score in zip(trajectories, scores, strict=True) if score is None]
    outcomes = await workers.call_each(grade_as_data, reward, sent, reward.timeout) if sent else []
    failed = [i for i, outcome in enumerate(outcomes) if isinstance(outcome, WorkerError)]
    controls = await run_concurrently(*(_grade_control(reward, sent[i], workers) for i in failed)) if failed else []
    for i, control in zip(failed, controls, strict=True):
        outcomes[i] = outcomes[i] if control is None else control
    graded = (_score_of(reward, outcome) for outcome in outcomes)
    return [next(graded) if score is None else score for score in scores]


def _for_worker(reward: RewardFunction, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with the fields that the reward reads: others are large, and need torch to be unpickled."""
    if not trajectory.fields:
        return trajectory
    fields = {name: values for name, values in trajectory.fields.items() if name in reward.reads_fields}
    branches = [_for_worker(reward, branch) for branch in trajectory.span.branches]
    return replace(trajectory, fields=fields, span=replace(trajectory.span, branches=branches))


def _score_of(reward: RewardFunction, outcome: Any) -> Score:
    """Return the score that a worker returned, or that of its error."""
    if isinstance(outcome, WorkerError):
        return _failure(reward, str(outcome))
    try:
        return as_score(Score(**outcome))
    except TypeError:  # the worker's own code would not send that
        return _failure(reward, f"its worker returned {show(outcome)}, expected a score")


async def _grade_control(reward: RewardFunction, trajectory: Trajectory, workers: Workers) -> dict[str, object] | None:
    """Return the score of an ungradable answer, None if the grader fails on the control too or has none."""
    if type(reward).control is RewardFunction.control:
        return None
    try:
        score: dict[str, object] | None = await workers.call(grade_control, (reward, trajectory), reward.timeout)
    except WorkerError:
        return None
    return score


def _failure(reward: RewardManager, what: str) -> Score:
    return Score(None, error=with_definition(f"{part_name(reward)}: {what}", reward, scoring_method(reward)))
