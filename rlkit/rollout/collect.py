"""Making trajectories: every conversation goes its own way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlkit.errors import RolloutError
from rlkit.roles.engine import RolloutEngine
from rlkit.types import Message, Prompt, Request, SampleKey, Sampling, StopReason, Trajectory, Turn

Finish = Callable[[list[Trajectory]], Awaitable[None]]


@dataclass(frozen=True)
class Sampler:
    """What all conversations of a step have in common."""

    engine: RolloutEngine
    tokenizer: Any
    sampling: Sampling
    samples: int
    seed: int
    step: int
    attempt: int = 0


def render(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Give the token ids with which a conversation starts, ready for the policy's turn."""
    ids: list[int] = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, return_dict=False)
    return ids


async def collect(sampler: Sampler, prompts: Sequence[tuple[int, Prompt]], finish: Finish) -> list[Trajectory]:
    """Sample every prompt `samples` times; `finish` is awaited with each group as soon as it is complete.

    Args:
        sampler: The engine, and how it is asked.
        prompts: Each with the id of its group, which its random numbers derive from.
        finish: Scores a group while others still run.

    Returns:
        Trajectories in the order of `prompts`; a failed one carries its error, and nothing else fails with it.
    """

    async def play_group(group: int, prompt: Prompt) -> list[Trajectory]:
        tokens = render(sampler.tokenizer, prompt.messages)
        played = [converse(sampler, prompt, tokens, group, sample) for sample in range(sampler.samples)]
        trajectories = list(await asyncio.gather(*played))
        await finish([t for t in trajectories if t.error is None])
        return trajectories

    groups = await asyncio.gather(*(play_group(group, prompt) for group, prompt in prompts))
    return [trajectory for group in groups for trajectory in group]


async def converse(sampler: Sampler, prompt: Prompt, tokens: list[int], group: int, sample: int) -> Trajectory:
    """Hold one conversation: the prompt, and the policy's answer to it."""
    key = SampleKey(sampler.seed, sampler.step, f"{group}/{prompt.id}", sample, sampler.attempt)
    request = Request(tuple(tokens), sampler.sampling, key, session=f"{key.step}/{key.prompt}/{sample}")
    start = len(tokens)
    try:
        answer = await sampler.engine.generate(request)
    except (RolloutError, TimeoutError) as error:
        return Trajectory(
            prompt=prompt,
            group=group,
            tokens=list(tokens),
            mask=[False] * start,
            logps=[0.0] * start,
            versions=[-1] * start,
            stop=StopReason.ERROR,
            error=f"{type(error).__name__}: {error}",
        )
    new = len(answer.tokens)
    return Trajectory(
        prompt=prompt,
        group=group,
        tokens=[*tokens, *answer.tokens],
        mask=[False] * start + [True] * new,
        logps=[0.0] * start + answer.logps,
        versions=[-1] * start + answer.versions,
        stop=answer.stop,
        turns=[Turn("user", 0, start), Turn("assistant", start, start + new)],
        text=sampler.tokenizer.decode(answer.tokens, skip_special_tokens=True),
        error=None if new else "the prompt leaves no room in the context for an answer",
    )
