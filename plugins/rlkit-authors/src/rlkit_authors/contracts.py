"""Contracts of each kind of part, to be called from a plugin's tests."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch

from rlkit.base.errors import RecipeError, show
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.interfaces.callback import Callback, LoggedRun, Logger
from rlkit.interfaces.fields import Field
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.launcher import LaunchedRun, Launcher
from rlkit.interfaces.loss import AdvantageLoss, Inputs, PolicyLoss
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.interfaces.reward import RewardFunction, RewardManager, as_score, scoring_method
from rlkit.interfaces.task import Curriculum, Split, Task
from rlkit.models.optimizer_state import try_out
from rlkit.types import Batch, PolicyOutput, Prompt, Score, StopReason, TrainBatch, Trajectory, Turn
from rlkit_authors.fields import check_filled, with_fields
from rlkit_authors.limits import time_limit

ODD_TEXTS = ("", " \n", "\x00\ufffd", "{[(<", r"\boxed{", "#### ", "१२", "1" * 5000)
"""Unusual texts that a policy may write."""

CALLS = (
    'See. <tool_call>{"name": "f", "arguments": {"a": [1, "}"]}}</tool_call>',
    "<tool_call><function=f><parameter=a>1</parameter></function></tool_call>",
    '{"name": "f", "parameters": {"a": 1}}',
    '[f(a=1, b="x"), g()]',
    '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}]',
    '```json\n{"name": "f", "arguments": null}\n```',
)
"""Tool calls in common formats."""


def example_batch(rewards: Sequence[float] = (1.0, 0.0, 0.0, 1.0), groups: Sequence[int] = (0, 0, 1, 1)) -> Batch:
    """Return a batch with prompts of two tokens and completions of one to four, with the reward on the last token."""
    rows, width = len(rewards), 6
    lengths = [3 + i % 4 for i in range(rows)]
    columns = torch.arange(width)
    attention = columns[None] < torch.tensor(lengths)[:, None]
    mask = attention & (columns >= 2)
    token_rewards = torch.zeros(rows, width)
    token_rewards[torch.arange(rows), torch.tensor(lengths) - 1] = torch.tensor(rewards)
    logps = torch.linspace(-2, -0.1, rows * width).reshape(rows, width) * mask
    return Batch(
        tokens=torch.arange(rows * width).reshape(rows, width) % 7,
        attention=attention,
        mask=mask,
        rollout_logps=logps,
        group=torch.tensor(groups),
        versions=torch.where(mask, 0, -1),
        token_rewards=token_rewards,
        rewards=token_rewards.sum(-1),
        components=torch.zeros(rows, 0),
        old_logps=logps.clone(),
    )


def example_trajectory(text: str, answer: str | None = "4") -> Trajectory:
    """Return a finished conversation with one token per character of the completion."""
    count = len(text)
    return Trajectory(
        prompt=Prompt("example", [{"role": "user", "content": "2 + 2 = ?"}], answer),
        group=0,
        tokens=[1, 2, *range(3, 3 + count)],
        mask=[False, False] + [True] * count,
        logps=[0.0, 0.0] + [-0.5] * count,
        versions=[-1, -1] + [0] * count,
        stop=StopReason.STOP,
        turns=[Turn("user", 0, 2), Turn("assistant", 2, 2 + count)],
        text=text,
    )


def check_advantage(estimator: AdvantageEstimator, fields: Sequence[Field] = ()) -> Batch:
    """Check that advantages have the batch's shape, are finite and float32, and are 0 outside the mask.

    It is tried on an ordinary batch, equal rewards, large rewards, and a batch without rows, as a rank may have. The
    batches provide what the estimator `needs`, and `fields` that it reads.
    """
    for batch in (example_batch([1.0] * 4), example_batch((1e6, -1e6, 0.0, 1e6)), _without_rows(example_batch())):
        _estimate(estimator, with_fields(estimator, batch, fields))
    return _estimate(estimator, with_fields(estimator, example_batch(), fields))


def _estimate(estimator: AdvantageEstimator, batch: Batch) -> Batch:
    name = type(estimator).__name__
    _provide(batch, estimator.needs)
    estimator.estimate(batch)
    problem = outputs.of_estimator(batch)
    if problem:
        raise AssertionError(f"{name} {problem}")
    batch.check()
    return batch


def _provide(batch: Batch, needs: Needs) -> None:
    """Set the fields that an estimator reads besides rewards and mask."""
    if Needs.VALUES in needs:
        batch.values = 0.5 * batch.mask
    if Needs.GREEDY in needs:
        batch.greedy_rewards = torch.full_like(batch.rewards, 0.5)
    if Needs.REFERENCE_REWARDS in needs:
        batch.reference_rewards = torch.tensor([[0.0, 1.0]]).expand(len(batch), 2)
    if Needs.ROLES in needs:
        batch.role, batch.role_names = batch.group % 2, ("first", "second")
    if Needs.COMPONENTS in needs:
        batch.components = batch.rewards[:, None]
        batch.component_names = ("accuracy",)
    if Needs.SUM_PI_SQUARED in needs:
        batch.sum_pi_squared = 0.5 * batch.mask


def _without_rows(batch: Batch) -> Batch:
    return batch.rows(torch.arange(0))


def example_train_batch(scale: float = 1.0) -> TrainBatch:
    """Return `example_batch` as a loss reads it: the first group has advantages of `scale`, the second of -`scale`."""
    batch = example_batch()
    batch.advantages = torch.where(batch.group[:, None] == 0, scale, -scale) * batch.mask
    return TrainBatch.of(batch)


def check_loss(loss: PolicyLoss, fields: Sequence[Field] = ()) -> torch.Tensor:
    """Check that the loss is per token, has a gradient, and ignores values outside the mask.

    It must also be finite for large log-ratios and on a batch without rows, and its metrics must have no gradient. The
    batches have the `fields` that it reads.
    """
    for log_ratio, batch in ((20.0, example_batch()), (-20.0, example_batch()), (0.0, _without_rows(example_batch()))):
        _compute_loss(loss, with_fields(loss, batch, fields), log_ratio)
    batch = with_fields(loss, example_batch(), fields)
    per_token, logps = _compute_loss(loss, batch, 0.01)
    (gradient,) = torch.autograd.grad(per_token[batch.mask].sum(), logps)
    if not bool(gradient[batch.mask].any()) or bool(gradient[~batch.mask].any()):
        raise AssertionError(f"{type(loss).__name__} has no gradient under the mask, or one outside it")
    if isinstance(loss, AdvantageLoss):
        _check_zero(loss, fields)
    return per_token


def _check_zero(loss: PolicyLoss, fields: Sequence[Field]) -> None:
    """Check that rows whose advantages are all 0 have no gradient."""
    for log_ratio in (-3.0, 0.01, 3.0):
        batch = with_fields(loss, example_batch(), fields)
        per_token, logps = _compute_loss(loss, batch, log_ratio, scale=0.0)
        if bool(torch.autograd.grad(per_token[batch.mask].sum(), logps)[0].any()):
            raise AssertionError(
                f"{type(loss).__name__} is an AdvantageLoss, but has a gradient where advantages are 0"
            )


def _compute_loss(
    loss: PolicyLoss, batch: Batch, log_ratio: float, scale: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss [B,T] of log-probs at this distance from the old ones, and those log-probs."""
    name = type(loss).__name__
    batch.advantages = torch.where(batch.group[:, None] == 0, scale, -scale) * batch.mask
    train_batch = TrainBatch.of(batch)
    logps = ((train_batch.old_logps + log_ratio) * batch.mask).requires_grad_()
    if Inputs.REFERENCE in loss.inputs:
        train_batch.ref_logps = train_batch.old_logps
    if loss.selects:
        train_batch.selected = loss.select(logps.detach(), train_batch)
        problem = outputs.of_selection(train_batch.selected, batch.mask)
        if problem:
            raise AssertionError(f"{name} {problem}")
    policy = _policy_output(logps, loss)
    if loss.forward.teacher_top:
        train_batch.teacher_top_ids = batch.tokens[..., None]
        train_batch.teacher_top_logps = torch.full((*batch.tokens.shape, 2), math.log(0.5))
        top_logps = torch.nn.functional.logsigmoid(torch.stack((logps, -logps), -1))
        policy = policy._replace(top_logps=top_logps)
    output = loss(policy, train_batch)
    problem = outputs.of_loss(output, batch.mask)
    if problem:
        raise AssertionError(f"{name} {problem}")
    if not bool(output.per_token.isfinite().all()):
        raise AssertionError(f"{name} is not finite where the log-ratio is {log_ratio:g}, outside the mask included")
    return output.per_token, logps


def _policy_output(logps: torch.Tensor, loss: PolicyLoss) -> PolicyOutput:
    """Return the policy's outputs for a loss; the most likely tokens are the first of the vocabulary."""
    reads, mask = loss.forward.statistics, logps != 0
    others = torch.zeros(*logps.shape, reads.top)
    return PolicyOutput(
        logps,
        torch.zeros_like(logps),
        sum_pi_squared=0.5 * mask if reads.squares else None,
        scores=logps if Inputs.SCORES in loss.inputs else None,
        mean_logps=2 * logps if reads.mean else None,
        top_ids=torch.arange(reads.top).expand(*logps.shape, -1) if reads.top else None,
        top_logps=torch.cat((logps[..., None], others), -1).log_softmax(-1) if reads.top else None,
        router_loss=torch.ones((), requires_grad=True) if reads.router else None,
    )


def check_reward(reward: RewardManager, texts: Sequence[str] = ("#### 4", "", "#### x")) -> list[Score]:
    """Check that a reward scores any text within its `timeout`, and that a reward function can be sent to a worker."""
    name = type(reward).__name__
    if isinstance(reward, RewardFunction):
        try:
            reward = pickle.loads(pickle.dumps(reward))
        except Exception as error:  # whatever pickling an attribute raises
            raise AssertionError(f"{name} cannot be pickled, as it must to be sent to a worker: {error}") from error
    for batch in (ODD_TEXTS, (), texts):
        trajectories = [example_trajectory(text) for text in batch]
        raw = [_grade(reward, t) for t in trajectories] if isinstance(reward, RewardFunction) else None
        with time_limit(f"{name}.score", reward.timeout * (1 if raw is None else max(1, len(raw)))):
            scores = asyncio.run(reward.score(trajectories))
        if len(scores) != len(batch) or not all(isinstance(s, Score) for s in scores):
            raise AssertionError(f"{name}.score returned {scores!r}, expected {len(batch)} scores")
        for text, value in zip(batch, scores if raw is None else raw, strict=True):
            if getattr(value, "error", None) is None and as_score(value).error:
                raise AssertionError(f"{name} returned {value!r} for {text!r}, expected finite numbers, or an error")
        for trajectory, score in zip(trajectories, scores, strict=True):
            check_filled(reward, scoring_method(reward), score.fields, turns=1, mask=trajectory.mask)
            count = None if score.token_rewards is None else len(score.token_rewards)
            if count not in (None, trajectory.response_length):
                expected = f"{trajectory.response_length}: one for each token that the policy chose"
                raise AssertionError(f"{name} returned {count} token_rewards, expected {expected}")
        if isinstance(reward, RewardFunction):
            _check_at_once(reward, trajectories)
    return scores


def _grade(reward: RewardFunction, trajectory: Trajectory) -> Score | float | None:
    with time_limit(f"{type(reward).__name__}.grade", reward.timeout):
        return reward.grade(trajectory)


def _check_at_once(reward: RewardFunction, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        grade = reward.grade_at_once(trajectory)
        if grade is None:
            continue
        expected = _grade(reward, trajectory)
        if as_score(grade) != as_score(expected):
            name = type(reward).__name__
            raise AssertionError(f"{name}.grade_at_once returned {show(grade)}, but grade returns {show(expected)}")


def check_task(task: Task) -> list[Prompt]:
    """Check that both splits have rows that become prompts with messages; return the first prompt of each."""
    prompts = []
    for split in get_args(Split):
        rows = task.rows(split)
        if len(rows) == 0:
            raise AssertionError(f"{type(task).__name__} has no {split} rows")
        prompt = task.prompt(rows[0], 0)
        problem = outputs.of_task(prompt)
        if problem:
            raise AssertionError(f"{type(task).__name__} {problem}")
        if task.prompt(task.rows(split)[0], 0) != prompt:
            raise AssertionError(f"{type(task).__name__} returned another prompt for the same row of {split}")
        prompts.append(prompt)
    return prompts


def check_curriculum(curriculum: Curriculum) -> None:
    """Check that a curriculum returns an integer of epochs for any success rate, and a finite difficulty for a prompt.

    It may refuse a prompt that does not state its difficulty by raising RecipeError.
    """
    name = type(curriculum).__name__
    for rate in (0.0, 0.125, 0.5, 1.0, -1.0, 2.5):
        problem = outputs.of_wait(curriculum.wait(rate))
        if problem:
            raise AssertionError(f"{name}.wait {problem} for the rate {rate}")
    try:
        difficulty = curriculum.difficulty(Prompt("p", [{"role": "user", "content": "2 + 2?"}], "4", {"difficulty": 2}))
    except RecipeError:
        return
    problem = outputs.of_difficulty(difficulty)
    if problem:
        raise AssertionError(f"{name}.difficulty {problem}")


def check_filter(group_filter: GroupFilter) -> None:
    """Check that a filter returns True or False for any scored group, and that `max_refills` is a valid count."""
    name = type(group_filter).__name__
    if group_filter.max_refills < 0:
        raise AssertionError(f"{name}.max_refills is {group_filter.max_refills}, expected 0 or more")
    for rewards in ((1.0, 0.0), (0.0, 0.0), (1.0,)):
        group = [example_trajectory("#### 4") for _ in rewards]
        for trajectory, reward in zip(group, rewards, strict=True):
            trajectory.score = Score(reward, {"accuracy": reward})
        problem = outputs.of_filter(group_filter.keep(group))
        if problem:
            raise AssertionError(f"{name}.keep {problem} with rewards {rewards}")


def check_parser(parser: ToolParser, texts: Sequence[str] = ()) -> list[ParsedTurn]:
    """Check that a parser reads any text without raising, including calls in many formats, truncated anywhere.

    Args:
        parser: The parser to check.
        texts: Further texts, in particular calls in the parser's own format; they are also truncated anywhere.
    """
    name = type(parser).__name__
    detected = parser.detects("{{ messages }}")
    if not isinstance(detected, bool):
        raise AssertionError(f"{name}.detects returned {detected!r}, expected True or False")
    plain = "The answer is four."
    turn = _parse(parser, plain)
    if turn != ParsedTurn(plain):
        raise AssertionError(f"{name} made {turn!r} of {plain!r}, expected the text and no calls")
    return [_parse(parser, text[:end]) for text in (*CALLS, *ODD_TEXTS[:-1], *texts) for end in range(len(text) + 1)]


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer updates all its weights, and that a checkpoint can hold its state."""
    problem = try_out(optimizer)
    if problem is not None:
        raise AssertionError(f"`make` {problem}")


def check_schedule(schedule: Schedule) -> None:
    """Check the factor of the learning rate along a run."""
    for progress in (0.0, 0.25, 0.5, 0.999):
        problem = outputs.of_schedule(schedule.factor(progress))
        if problem is not None:
            raise AssertionError(f"`factor` at {progress} {problem}")


def check_launcher(launcher: Launcher) -> None:
    """Check that `launch` takes a run and is no coroutine; no process is started."""
    run = LaunchedRun(("--recipe=quickstart",), Path("/run"), None, False, 2, 4, True)
    try:
        inspect.signature(launcher.launch).bind(run)
    except TypeError as error:
        raise AssertionError(f"`launch` does not take a `LaunchedRun`: {error}") from error
    if inspect.iscoroutinefunction(launcher.launch):
        raise AssertionError("`launch` is a coroutine, expected a method that returns the exit status")


def check_callback(callback: Callback) -> None:
    """Check that a callback has only the interface's hooks, and that its state survives JSON and a resumed run."""
    unknown = [name for name in dir(callback) if name.startswith("on_") and not hasattr(Callback, name)]
    if unknown:
        hooks = ", ".join(name for name in dir(Callback) if name.startswith("on_"))
        raise AssertionError(f"{type(callback).__name__}.{unknown[0]} is never called; expected one of {hooks}")
    state = callback.state_dict()
    if not isinstance(state, dict) or json.loads(json.dumps(state, allow_nan=False)) != state:
        raise AssertionError(f"`state_dict` returned {state!r}, expected JSON data by name")
    if state:
        callback.load_state_dict(state)
        reloaded = callback.state_dict()
        if reloaded != state:
            raise AssertionError(f"`state_dict` returned {reloaded!r} after `load_state_dict` of {state!r}")


def check_logger(logger: Logger) -> None:
    """Check that a logger's methods take the arguments of a run; nothing is logged."""
    run = LoggedRun(Path(), "id", {}, 0)
    for method, arguments in ((logger.open, (run,)), (logger.log_metrics, ({}, 1)), (logger.finalize, ("success",))):
        inspect.signature(method).bind(*arguments)


def _parse(parser: ToolParser, text: str) -> ParsedTurn:
    name = type(parser).__name__
    try:
        turn = parser.parse(text)
    except Exception as error:  # a parser must not raise anything
        raise AssertionError(f"{name}.parse raised {type(error).__name__}: {error} on {text!r}") from error
    if not isinstance(turn, ParsedTurn) or not isinstance(turn.text, str):
        raise AssertionError(f"{name}.parse returned {turn!r} for {text!r}, expected a ParsedTurn")
    for call in turn.calls:
        if not isinstance(call.name, str) or not isinstance(call.arguments, dict) or (call.error and call.arguments):
            raise AssertionError(
                f"{name}.parse returned {call!r} for {text!r}, expected arguments by name, none with an error"
            )
    return turn
