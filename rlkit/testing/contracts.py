"""What every part of a role must hold to: call these from a plugin's tests."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Sequence

import torch

from rlkit.roles.advantage import AdvantageEstimator
from rlkit.roles.loss import PolicyLoss
from rlkit.roles.reward import RewardFunction, RewardManager
from rlkit.roles.task import Task
from rlkit.types import Batch, PolicyOutput, Prompt, Score, StopReason, Trajectory, Turn


def example_batch(rewards: Sequence[float] = (1.0, 0.0, 0.0, 1.0), groups: Sequence[int] = (0, 0, 1, 1)) -> Batch:
    """Make a batch with a two-token prompt and answers of one to four tokens, the last of which has the reward."""
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
        parts=torch.zeros(rows, 0),
        old_logps=logps.clone(),
    )


def example_trajectory(text: str, answer: str | None = "4") -> Trajectory:
    """Make a finished conversation with one token a character of the answer."""
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
    """Check that advantages have the batch's shape, are finite and float32, and are 0 outside the mask."""
    batch = example_batch()
    estimator.estimate(batch)
    name = type(estimator).__name__
    if batch.advantages is None:
        raise AssertionError(f"{name}.estimate left batch.advantages unset")
    batch.check()
    if batch.advantages.dtype != torch.float32 or not bool(batch.advantages.isfinite().all()):
        raise AssertionError(f"{name} gave advantages of {batch.advantages.dtype}, expected finite float32")
    if bool((batch.advantages[~batch.mask] != 0).any()):
        raise AssertionError(f"{name} gave advantages outside the mask")
    return batch


def check_loss(loss: PolicyLoss) -> torch.Tensor:
    """Check that the loss is per token, has a gradient, and ignores what stands outside the mask."""
    batch = example_batch()
    batch.advantages = torch.where(batch.group[:, None] == 0, 1.0, -1.0) * batch.mask
    assert batch.old_logps is not None
    logps = (batch.old_logps + 0.01).requires_grad_()
    per_token = loss(PolicyOutput(logps, torch.zeros_like(logps)), batch).per_token
    name = type(loss).__name__
    if per_token.shape != batch.mask.shape:
        raise AssertionError(
            f"{name} gave a loss of shape {tuple(per_token.shape)}, expected {tuple(batch.mask.shape)}"
        )
    (gradient,) = torch.autograd.grad(per_token[batch.mask].sum(), logps)
    if not bool(gradient[batch.mask].any()) or bool(gradient[~batch.mask].any()):
        raise AssertionError(f"{name} has no gradient under the mask, or one outside it")
    return per_token


def check_reward(reward: RewardManager, texts: Sequence[str] = ("#### 4", "", "#### x")) -> list[Score]:
    """Check that a reward scores any text, and can be sent to a worker if it is a function."""
    trajectories = [example_trajectory(text) for text in texts]
    if isinstance(reward, RewardFunction):
        reward = pickle.loads(pickle.dumps(reward))
    scores = asyncio.run(reward.score(trajectories))
    if len(scores) != len(texts) or not all(isinstance(s, Score) for s in scores):
        raise AssertionError(f"{type(reward).__name__}.score gave {scores!r}, expected {len(texts)} scores")
    return scores


def check_task(task: Task) -> list[Prompt]:
    """Check that both splits have rows which become prompts with messages; give the first of each."""
    prompts = []
    for split in ("train", "validation"):
        rows = task.rows(split)  # type: ignore[arg-type]
        if len(rows) == 0:
            raise AssertionError(f"{type(task).__name__} gives no {split} rows")
        prompt = task.prompt(rows[0], 0)
        if not prompt.messages or any("role" not in m or "content" not in m for m in prompt.messages):
            raise AssertionError(f"{type(task).__name__} gave {prompt!r}, expected messages with role and content")
        prompts.append(prompt)
    return prompts
