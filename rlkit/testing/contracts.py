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

from rlkit.errors import RecipeError, show
from rlkit.interfaces import outputs
from rlkit.interfaces.advantage import AdvantageEstimator, Needs
from rlkit.interfaces.callback import Callback, LoggedRun, Logger
from rlkit.interfaces.filter import GroupFilter
from rlkit.interfaces.loss import AdvantageLoss, Inputs, PolicyLoss
from rlkit.interfaces.optimizer import Optimizer, Schedule
from rlkit.interfaces.parser import ParsedTurn, ToolParser
from rlkit.interfaces.reward import RewardFunction, RewardManager, as_score
from rlkit.interfaces.task import Curriculum, Split, Task
from rlkit.optimizers.trial import try_out
from rlkit.testing.limits import time_limit
from rlkit.types import Batch, PolicyOutput, Prompt, Score, StopReason, TrainBatch, Trajectory, Turn

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
    """Return a batch with a two-token prompt and answers of one to four tokens, the last of which has the reward."""
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
    """Return a finished conversation with one token per character of the answer."""
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


def check_advantage(estimator: AdvantageEstimator) -> Batch:
    """Check that advantages have the batch's shape, are finite and float32, and are 0 outside the mask.

    The batches provide what the estimator `needs`: an ordinary one, one of equal rewards, one of large rewards, and one
    without rows, as a rank may have.
    """
    for batch in (example_batch([1.0] * 4), example_batch((1e6, -1e6, 0.0, 1e6)), _without_rows(example_batch())):
        _estimate(estimator, batch)
    return _estimate(estimator, example_batch())


def _estimate(estimator: AdvantageEstimator, batch: Batch) -> Batch:
    name = type(estimator).__name__
    _provide(batch, estimator.needs)
    estimator.estimate(batch)
    if problem := outputs.of_estimator(batch):
        raise AssertionError(f"{name} {problem}")
    batch.check()
    return batch


def _provide(batch: Batch, needs: Needs) -> None:
    """Set the fields that an estimator reads besides rewards and mask."""
    if Needs.VALUES in needs:
        batch.values = 0.5 * batch.mask
    if Needs.GREEDY in needs:
        batch.greedy_rewards = torch.full_like(batch.rewards, 0.5)
    if Needs.COMPONENTS in needs:
        batch.components, batch.component_names = batch.rewards[:, None], ("accuracy",)
    if Needs.SUM_PI_SQUARED in needs:
        batch.sum_pi_squared = 0.5 * batch.mask


def _without_rows(batch: Batch) -> Batch:
    return batch.rows(torch.arange(0))


def example_train_batch(scale: float = 1.0) -> TrainBatch:
    """Return `example_batch` as a loss reads it: the first group has advantages of `scale`, the second of -`scale`."""
    batch = example_batch()
    batch.advantages = torch.where(batch.group[:, None] == 0, scale, -scale) * batch.mask
    return TrainBatch.of(batch)


def check_loss(loss: PolicyLoss) -> torch.Tensor:
    """Check that the loss is per token, has a gradient, and ignores values outside the mask.

    It must also be finite for large log-ratios and on a batch without rows, and its metrics have no gradient.
    """
    for log_ratio, batch in ((20.0, example_batch()), (-20.0, example_batch()), (0.0, _without_rows(example_batch()))):
        _lose(loss, batch, log_ratio)
    batch = example_batch()
    per_token, logps = _lose(loss, batch, 0.01)
    (gradient,) = torch.autograd.grad(per_token[batch.mask].sum(), logps)
    if not bool(gradient[batch.mask].any()) or bool(gradient[~batch.mask].any()):
        raise AssertionError(f"{type(loss).__name__} has no gradient under the mask, or one outside it")
    if isinstance(loss, AdvantageLoss):
        _check_zero(loss)
    return per_token


def _check_zero(loss: PolicyLoss) -> None:
    """Check that rows whose advantages are all 0 have no gradient."""
    for log_ratio in (-3.0, 0.01, 3.0):
        batch = example_batch()
        per_token, logps = _lose(loss, batch, log_ratio, scale=0.0)
        if bool(torch.autograd.grad(per_token[batch.mask].sum(), logps)[0].any()):
            raise AssertionError(
                f"{type(loss).__name__} is an AdvantageLoss, but has a gradient where advantages are 0"
            )


def _lose(loss: PolicyLoss, batch: Batch, log_ratio: float, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss [B,T] of log-probs at this distance from the old ones, and those log-probs."""
    name = type(loss).__name__
    batch.advantages = torch.where(batch.group[:, None] == 0, scale, -scale) * batch.mask
    ready = TrainBatch.of(batch)
    logps = ((ready.old_logps + log_ratio) * batch.mask).requires_grad_()
    if Inputs.REFERENCE in loss.inputs:
        ready.ref_logps = ready.old_logps
    if loss.selects:
        ready.selected = loss.select(logps.detach(), ready)
        if problem := outputs.of_selection(ready.selected, batch.mask):
            raise AssertionError(f"{name} {problem}")
    policy = PolicyOutput(logps, torch.zeros_like(logps), scores=logps if Inputs.SCORES in loss.inputs else None)
    if loss.forward.teacher_top:
        ready.teacher_top_ids = batch.tokens[..., None]
        ready.teacher_top_logps = torch.full((*batch.tokens.shape, 2), math.log(0.5))
        both = torch.nn.functional.logsigmoid(torch.stack((logps, -logps), -1))
        policy = policy._replace(top_logps=both)
    out = loss(policy, ready)
    if problem := outputs.of_loss(out, batch.mask):
        raise AssertionError(f"{name} {problem}")
    if not bool(out.per_token.isfinite().all()):
        raise AssertionError(f"{name} is not finite where the log-ratio is {log_ratio:g}, outside the mask included")
    if graded := [metric for metric, value in out.metrics.items() if value.requires_grad]:
        raise AssertionError(f"{name} returned the metric {graded[0]!r} with a gradient, expected detached tensors")
    return out.per_token, logps


def check_reward(reward: RewardManager, texts: Sequence[str] = ("#### 4", "", "#### x")) -> list[Score]:
    """Check that a reward scores any text and no text within its `timeout`; a function can be sent to a worker."""
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
        if isinstance(reward, RewardFunction):
            _check_at_once(reward, trajectories)
    return scores


def _grade(reward: RewardFunction, trajectory: Trajectory) -> Score | float:
    with time_limit(f"{type(reward).__name__}.grade", reward.timeout):
        return reward.grade(trajectory)


def _check_at_once(reward: RewardFunction, trajectories: Sequence[Trajectory]) -> None:
    for trajectory in trajectories:
        found = reward.grade_at_once(trajectory)
        if found is not None and as_score(found) != as_score(expected := _grade(reward, trajectory)):
            name = type(reward).__name__
            raise AssertionError(f"{name}.grade_at_once returned {show(found)}, but grade returns {show(expected)}")


def check_task(task: Task) -> list[Prompt]:
    """Check that both splits have rows that become prompts with messages; return the first prompt of each."""
    prompts = []
    for split in get_args(Split):
        rows = task.rows(split)
        if len(rows) == 0:
            raise AssertionError(f"{type(task).__name__} has no {split} rows")
        prompt = task.prompt(rows[0], 0)
        if problem := outputs.of_task(prompt):
            raise AssertionError(f"{type(task).__name__} {problem}")
        if task.prompt(task.rows(split)[0], 0) != prompt:
            raise AssertionError(f"{type(task).__name__} returned another prompt for the same row of {split}")
        prompts.append(prompt)
    return prompts


def check_curriculum(curriculum: Curriculum) -> None:
    """Check that a curriculum returns a whole number of epochs for any success rate, a finite difficulty for a prompt.

    A prompt that lacks what the difficulty is read from is refused by RecipeError.
    """
    name = type(curriculum).__name__
    for rate in (0.0, 0.125, 0.5, 1.0, -1.0, 2.5):
        if problem := outputs.of_wait(curriculum.wait(rate)):
            raise AssertionError(f"{name}.wait {problem} for the rate {rate}")
    try:
        found = curriculum.difficulty(Prompt("p", [{"role": "user", "content": "2 + 2?"}], "4", {"difficulty": 2}))
    except RecipeError:
        return
    if problem := outputs.of_difficulty(found):
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
        if problem := outputs.of_filter(group_filter.keep(group)):
            raise AssertionError(f"{name}.keep {problem} with rewards {rewards}")


def check_parser(parser: ToolParser, texts: Sequence[str] = ()) -> list[ParsedTurn]:
    """Check that a parser reads any text without raising, including calls in many formats, truncated anywhere.

    Args:
        parser: The parser to check.
        texts: Further texts, above all calls in its own format; they are truncated anywhere as well.
    """
    name = type(parser).__name__
    if not isinstance(found := parser.detects("{{ messages }}"), bool):
        raise AssertionError(f"{name}.detects returned {found!r}, expected True or False")
    plain = "The answer is four."
    if (turn := _parse(parser, plain)) != ParsedTurn(plain):
        raise AssertionError(f"{name} made {turn!r} of {plain!r}, expected the text and no calls")
    return [_parse(parser, text[:end]) for text in (*CALLS, *ODD_TEXTS[:-1], *texts) for end in range(len(text) + 1)]


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that it steps all weights that it is given, and keeps a state that a checkpoint can hold."""
    if (problem := try_out(optimizer)) is not None:
        raise AssertionError(f"`make` {problem}")


def check_schedule(schedule: Schedule) -> None:
    """Check the learning rate's factor along a run."""
    for progress in (0.0, 0.25, 0.5, 0.999):
        if (problem := outputs.of_schedule(schedule.factor(progress))) is not None:
            raise AssertionError(f"`factor` at {progress} {problem}")


def check_callback(callback: Callback) -> None:
    """Check that its methods exist under the interface's names, and that its state survives JSON and a resumed run."""
    odd = [n for n in dir(callback) if n.startswith("on_") and not hasattr(Callback, n)]
    if odd:
        near = ", ".join(name for name in dir(Callback) if name.startswith("on_"))
        raise AssertionError(f"{type(callback).__name__}.{odd[0]} is called by nothing; expected one of {near}")
    state = callback.state_dict()
    if not isinstance(state, dict) or json.loads(json.dumps(state, allow_nan=False)) != state:
        raise AssertionError(f"`state_dict` returned {state!r}, expected what JSON holds, by name")
    if state:
        callback.load_state_dict(state)
        if (again := callback.state_dict()) != state:
            raise AssertionError(f"`state_dict` returned {again!r} after `load_state_dict` of {state!r}")


def check_logger(logger: Logger) -> None:
    """Check that its methods take what a run calls them with; nothing is logged."""
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
