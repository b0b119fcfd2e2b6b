"""Making trajectories: every conversation goes its own way, and no turn waits for another conversation's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from rlkit.errors import RolloutError, explain
from rlkit.interfaces.engine import RolloutEngine
from rlkit.registry import calling, require
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.rollout.participants import Participants, ParticipantSession
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, Prompt, Request, SampleKey, Sampling, StopReason, Trajectory

Finish = Callable[[list[Trajectory]], Awaitable[None]]


@dataclass
class BusyTimer:
    """Seconds in which the engine had requests, while conversations were running."""

    busy: float = 0.0
    asked: int = 0
    since: float = 0.0

    def enter(self) -> None:
        if self.asked == 0:
            self.since = time.perf_counter()
        self.asked += 1

    def leave(self) -> None:
        self.asked -= 1
        if self.asked == 0:
            self.busy += time.perf_counter() - self.since


@dataclass(frozen=True)
class Sampler:
    """What all conversations of a step have in common.

    Args:
        engine: Samples the policy's turns.
        template: Renders the messages that the policy reads.
        sampling: How a turn is sampled.
        samples: Conversations of each prompt.
        seed: Of the run.
        step: Of the run; with the prompt and the sample it names all random numbers.
        attempt: Counts prompts that took the place of others.
        participants: Tools, a user, an environment.
        limits: What ends a conversation.
        seconds: Deadline of a whole conversation, in which the time that the engine takes is not counted.
        check: What to do where the flat run is not the template's own rendering of the conversation.
        gauge: Measures the engine's idle time.
    """

    engine: RolloutEngine
    template: ChatTemplate
    sampling: Sampling
    samples: int
    seed: int
    step: int
    attempt: int = 0
    participants: Participants = field(default_factory=Participants)
    limits: Limits = field(default_factory=Limits)
    seconds: float | None = None
    check: str = "off"
    gauge: BusyTimer = field(default_factory=BusyTimer)


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
        sampled = [converse(sampler, prompt, group, sample) for sample in range(sampler.samples)]
        trajectories = list(await asyncio.gather(*sampled))
        await finish([t for t in trajectories if t.error is None])
        return trajectories

    groups = await asyncio.gather(*(play_group(group, prompt) for group, prompt in prompts))
    return [trajectory for group in groups for trajectory in group]


async def converse(sampler: Sampler, prompt: Prompt, group: int, sample: int) -> Trajectory:
    """Hold one conversation, to its end or to its deadline."""
    key = SampleKey(sampler.seed, sampler.step, f"{group}/{prompt.id}", sample, sampler.attempt)
    conversation = Conversation(prompt, group, sampler.limits)
    said: list[str] = []
    async with sampler.participants.open_session(conversation, key) as session:
        try:
            async with asyncio.timeout(sampler.seconds) as clock:
                await session.open()
                conversation.begin(sampler.template.start(session.messages))
                while not conversation.over:
                    await _turn(sampler, conversation, session, said, key, clock=clock)
                await session.add_tool_rewards()
        except (RolloutError, TimeoutError) as error:
            what = explain(error)
            if isinstance(error, TimeoutError) and sampler.seconds is not None:
                what = f"the conversation took longer than {sampler.seconds:g} s"
            if conversation.over:
                conversation.error = what
            else:
                conversation.fail(what)
        _check(sampler, conversation, session)
    return conversation.trajectory(said[-1] if said else "", session.messages)


async def _turn(
    sampler: Sampler,
    conversation: Conversation,
    session: ParticipantSession,
    said: list[str],
    key: SampleKey,
    *,
    clock: asyncio.Timeout,
) -> None:
    """Sample a turn of the policy and collect the replies; the clock is paused while it samples."""
    with _stopped(clock):
        answer = await _ask(sampler, conversation, key)
    conversation.sampled(answer)
    if not answer.tokens:
        return
    said.append(sampler.template.text(answer.tokens, special=False))
    raw = sampler.template.text(answer.tokens, special=True)
    session.messages.append({"role": "assistant", "content": raw if sampler.participants.tools else said[-1]})
    if conversation.over:
        return
    with calling(sampler.participants.parser, "parse"):
        turn = session.read(raw)
    if turn.calls:
        conversation.call_tools(len(turn.calls))
        if conversation.over:
            return
        messages, done = await session.call(turn.calls), False
    else:
        conversation.interact()
        messages, done = await session.answer(said[-1])
    if done or not messages:
        conversation.complete(StopReason.STOP)
        return
    session.messages.extend(sampler.template.plain(messages))
    conversation.told(messages[0]["role"], sampler.template.delta(messages))


@contextmanager
def _stopped(clock: asyncio.Timeout) -> Iterator[None]:
    """Stop a clock: time in the engine's queue would end the conversations that are answered last or at length."""
    now, deadline = asyncio.get_running_loop().time, clock.when()
    left = None if deadline is None else deadline - now()
    clock.reschedule(None)
    yield
    clock.reschedule(None if left is None else now() + left)


async def _ask(sampler: Sampler, conversation: Conversation, key: SampleKey) -> Completion:
    """Sample a turn within what is left of the conversation's tokens."""
    budget = conversation.budget(sampler.sampling.max_tokens)
    sampling = sampler.sampling if budget == sampler.sampling.max_tokens else sampler.sampling.within(budget)
    request = Request(tuple(conversation.tokens), sampling, key, session=f"{key.step}/{key.prompt}/{key.sample}")
    sampler.gauge.enter()
    try:
        answer = await sampler.engine.generate(request)
    finally:
        sampler.gauge.leave()
    if not len(answer.tokens) == len(answer.logps) == len(answer.versions):
        counts = f"{len(answer.tokens)} tokens, {len(answer.logps)} log-probs and {len(answer.versions)} versions"
        require(sampler.engine, "generate", f"gave {counts}, expected as many of each")
    cut_by_context = (
        answer.stop is StopReason.LENGTH
        and len(conversation.tokens) + len(answer.tokens) >= conversation.limits.context
    )
    return Completion(answer.tokens, answer.logps, answer.versions, StopReason.CONTEXT) if cut_by_context else answer


def _check(sampler: Sampler, conversation: Conversation, session: ParticipantSession) -> None:
    """Compare the flat run with the template's own rendering of the conversation, and say where they part.

    Texts are compared, not tokens: the policy may write a text in other tokens than the tokenizer would choose. Where
    nothing followed the policy's turn, there is nothing to compare.
    """
    if sampler.check == "off" or conversation.error is not None or len(conversation.rewards) < 2:
        return
    whole = sampler.template.rendered(session.messages)
    flat = sampler.template.decode(conversation.tokens)
    if whole.startswith(flat) or (conversation.stop is StopReason.STOP and flat.startswith(whole)):
        return
    conversation.count("template_differs")
    if sampler.check == "strict":
        shorter = min(len(flat), len(whole))
        place = next((i for i in range(shorter) if flat[i] != whole[i]), shorter)
        before, here, there = flat[max(0, place - 20) : place], flat[place : place + 20], whole[place : place + 20]
        conversation.error = (
            f"after {before!r} the conversation goes on with {here!r}, but the template renders {there!r}"
        )
