"""Sampling trajectories: conversations run concurrently, and no turn waits for one of another conversation."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from rlkit.base.deadlines import deadline, queued
from rlkit.base.errors import RecipeError, RolloutError, explain
from rlkit.base.tasks import run_concurrently, run_first
from rlkit.base.text import tokens_until
from rlkit.interfaces.content import pictures_of
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.fields import Field, Filled, assemble, tensors_of
from rlkit.ops.routes import ROUTES
from rlkit.recipe.rollout import sampling_of_row
from rlkit.registry import require
from rlkit.rollout.conversation import Conversation, Limits
from rlkit.rollout.gate import Gate, remainder
from rlkit.rollout.participants import Participants, ParticipantSession
from rlkit.rollout.replies import without_middle
from rlkit.rollout.template import ChatTemplate
from rlkit.types import (
    Completion,
    Media,
    Message,
    Prompt,
    Rendered,
    Request,
    SampleKey,
    Sampling,
    StopReason,
    Tools,
    Trajectory,
)

Converse = Callable[["ConversationSetup", Prompt, int, int], Awaitable[Trajectory]]
"""Returns a sample of a prompt, given the numbers of its group and of the sample."""
Finish = Callable[[list[Trajectory]], Awaitable[None]]
Ask = Callable[[Request], Awaitable[Completion]]


@dataclass
class BusyTimer:
    """Measures in what share of the time no request was in the engine: each is a context that enters the timer."""

    busy: float = 0.0
    requests: int = 0
    since: float = 0.0
    measured: float = field(default_factory=time.perf_counter)

    def __enter__(self) -> None:
        if self.requests == 0:
            self.since = time.perf_counter()
        self.requests += 1

    def __exit__(self, *_: object) -> None:
        self.requests -= 1
        if self.requests == 0:
            self.busy += time.perf_counter() - self.since

    def idle_share(self) -> float:
        """Return the share of the time since the last call in which no request was in the engine."""
        now, start = time.perf_counter(), self.measured
        busy = self.busy + (now - self.since if self.requests else 0.0)
        self.busy, self.since, self.measured = 0.0, now, now
        return 1 - busy / max(now - start, 1e-9)


STOP_CHUNK = 32
"""Tokens of a turn after which its text is first searched for stop texts; then twice as many more each time."""


@dataclass(frozen=True)
class ConversationSetup:
    """What all conversations of a step have in common.

    Args:
        engine: Samples the policy's turns.
        template: Renders what the policy reads.
        sampling: How a turn is sampled.
        samples: Conversations of each prompt.
        seed: Of the run.
        step: Of the run; with the prompt and the sample it determines all random numbers.
        attempt: Counts prompts that took the place of others.
        participants: Tools, a user, an environment.
        limits: What ends a conversation.
        seconds: Deadline of a conversation, from its admission; time in the engine and in queues does not count.
        check: What to do where the flat run is not the template's own rendering of the conversation.
        timer: Measures the engine's idle time.
        admission: Entered by each conversation before it begins; it bounds how many there are at once.
        gate: Where requests wait while the trainer learns; None where nothing is sampled then.
        agent: Returns a rollout of the recipe's agent; None for conversations that rlkit drives.
        sampling_column: The column with a row's own options of sampling; None if rows have none.
        fields: The declared fields by name.
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
    timer: BusyTimer = field(default_factory=BusyTimer)
    admission: AbstractAsyncContextManager[object] = field(default_factory=nullcontext)
    gate: Gate | None = None
    agent: Converse | None = None
    sampling_column: str | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)

    @property
    def asks_routes(self) -> bool:
        """Whether completions hold the experts of each token: where they are trained on, if the engine returns them."""
        return self.engine.routers is not None and self.step > 0

    def most_likely(self) -> ConversationSetup:
        """Return the same for one greedy completion of each prompt."""
        return replace(self, sampling=self.sampling.most_likely(), samples=1)


class Quota(NamedTuple):
    """How many groups are sampled to their end, all of the first ones among them; the others are stopped then."""

    groups: int
    first: int


async def collect(
    setup: ConversationSetup, prompts: Sequence[tuple[int, Prompt]], finish: Finish, quota: Quota | None = None
) -> list[Trajectory]:
    """Sample every prompt `samples` times; `finish` is awaited with each group as soon as it is complete.

    Args:
        setup: The engine and how it is used.
        prompts: Each with the id of its group, from which its random numbers are derived.
        finish: Scores a group while others are sampled.
        quota: How many groups are enough; None for all.

    Returns:
        Trajectories in the order of `prompts`; a failed one carries its error, and nothing else fails with it.

    Raises:
        EngineError: The engine failed. As with any error, no conversation is left running.
    """

    async def sample_group(group: int, prompt: Prompt) -> list[Trajectory]:
        trajectories = await run_concurrently(
            *(converse(setup, prompt, group, sample) for sample in range(setup.samples))
        )
        for trajectory in trajectories:
            for branch in trajectory.samples:
                starts = [turn.start for turn in branch.turns if turn.role == "assistant"]
                if starts:  # what was open before the policy's last turn
                    branch.opened_thinking = setup.template.codec.opened_thinking(branch.tokens[: starts[-1]])
        await finish([t for t in trajectories if t.error is None])
        return trajectories

    awaited = len(prompts) if quota is None else quota.first
    postponable = 0 if quota is None else quota.groups - quota.first
    work = [sample_group(group, prompt) for group, prompt in (prompts if postponable else prompts[:awaited])]
    finished = await run_concurrently(run_first(awaited, *work[:awaited]), run_first(postponable, *work[awaited:]))
    return [trajectory for groups in finished for group in groups for trajectory in group or ()]


async def converse(setup: ConversationSetup, prompt: Prompt, group: int, sample: int) -> Trajectory:
    """Return one conversation, at its end or its deadline, which counts from the conversation's admission."""
    if setup.sampling_column is not None:
        setup = replace(setup, sampling=sampling_of_row(setup.sampling, prompt.meta.get(setup.sampling_column)))
    if setup.agent is not None:
        return await setup.agent(setup, prompt, group, sample)
    key = SampleKey(setup.seed, setup.step, f"{group}/{prompt.id}", sample, setup.attempt)
    conversation = Conversation(prompt, group, setup.limits)
    texts: list[str] = []
    async with setup.admission, ParticipantSession(setup.participants, conversation, key) as session:
        clock: asyncio.Timeout | None = None
        try:
            async with nullcontext() if setup.seconds is None else deadline(setup.seconds) as clock:
                session.messages += _readable(setup, conversation, await session.open())
                conversation.begin(*await _rendered(setup.template.render_start, session.messages, prompt.tools))
                while not conversation.over:
                    await _turn(setup, conversation, session, texts, key)
                await session.add_tool_rewards()
        except (RolloutError, TimeoutError) as error:
            late = clock is not None and clock.expired()
            problem = f"the conversation took longer than {setup.seconds:g} s" if late else explain(error)
            if conversation.over:
                conversation.error = problem
            else:
                conversation.fail(problem)
        _check(setup, conversation, session)
    trajectory = conversation.trajectory(texts[-1] if texts else "", session.messages)
    trajectory.fields = assemble(setup.fields, conversation.filled, len(trajectory.tokens), len(conversation.rewards))
    return trajectory


async def _turn(
    setup: ConversationSetup, conversation: Conversation, session: ParticipantSession, texts: list[str], key: SampleKey
) -> None:
    """Sample a turn of the policy within what is left of its tokens, and append what the participants answer to it."""
    budget = conversation.budget(setup.sampling.max_tokens)
    has_run = max((turn.end - 1 for turn in conversation.turns if turn.role == "assistant"), default=0)
    request = Request(
        tuple(conversation.tokens),
        setup.sampling if budget == setup.sampling.max_tokens else setup.sampling.within(budget),
        key,
        session=f"{key.step}/{key.prompt}/{key.sample}",
        media=Media.of(conversation.media),
        continues=len(conversation.rewards) + 1 < conversation.limits.turns,
        routes_from=has_run if setup.asks_routes else None,
    )
    with queued():  # time in the engine would end the conversations that are answered last or at length
        answer = await ask_engine(setup, request)
    opened = setup.template.codec.opened_thinking(conversation.tokens)
    conversation.sampled(answer)
    if not answer.tokens:
        return
    texts.append(setup.template.codec.turn(answer.tokens, special=False))
    raw = setup.template.codec.turn(answer.tokens, special=True) if setup.participants.tools else texts[-1]
    session.add_turn(raw, opened)
    if conversation.over:
        return
    turn = session.read(raw, opened)
    if turn.calls:
        conversation.call_tools(len(turn.calls))
        if conversation.over:
            return
        messages, over = await session.call(turn.calls), False
    else:
        conversation.interact()
        messages, over = await session.answer(opened + texts[-1])
    if over or not messages:
        conversation.complete(StopReason.STOP)
        return
    plain_messages = _readable(setup, conversation, messages)
    session.messages += plain_messages
    render = partial(setup.template.render_delta, after=answer.tokens[-1])
    conversation.observed(plain_messages[0]["role"], *await _rendered(render, plain_messages))


async def _rendered(render: Callable[..., Rendered], messages: list[Message], *tools: Tools | None) -> Rendered:
    """Render the policy's next input; pictures are read in another thread, since that takes time.

    Raises:
        RolloutError: A picture of a participant cannot be read.
    """
    if not pictures_of(messages):
        return render(messages, *tools)
    try:
        with queued():
            return await asyncio.to_thread(render, messages, *tools)
    except RecipeError as error:
        raise RolloutError(str(error)) from error


def _readable(setup: ConversationSetup, conversation: Conversation, messages: Sequence[Message]) -> list[Message]:
    """Return the participants' messages as the policy reads them: long ones cut, and without special tokens."""
    limit, template, read = setup.limits.reply, setup.template, []
    for message in messages:
        cut = None if limit is None else without_middle(message, limit, template.codec.count)
        if cut is not None:
            conversation.count("replies_cut")
        read.append(template.codec.plain(message if cut is None else cut))
    return read


async def _until_stop(setup: ConversationSetup, request: Request, ask: Ask) -> Completion:
    """Return a turn up to its first stop text, which is looked for after 32 tokens, 64 more, and so on.

    So any engine may sample it: a request asks for more tokens of the turn, as after an interruption.
    """
    stops = request.sampling.stop
    request = replace(request, sampling=replace(request.sampling, stop=()))
    limit, chunk = request.sampling.max_tokens, STOP_CHUNK
    answer = Completion([], [], [], StopReason.LENGTH)
    while answer.stop is StopReason.LENGTH and len(answer.tokens) < limit:
        part = await ask(remainder(request, answer, min(len(answer.tokens) + chunk, limit)))
        answer = answer.followed_by(part)
        count = tokens_until(answer.tokens, stops, setup.template.codec.decode)
        if count is not None:
            return answer.first(count)
        if not part.tokens:
            break
        chunk *= 2
    return answer


async def _generate(engine: RolloutEngine, request: Request) -> Completion:
    """Return an engine's answer, with the checked values of the fields that it fills."""
    answer = await engine.generate(request)
    count, problem = len(answer.tokens), None
    counts = range(count, count + len(request.tokens) + 1)
    try:
        values = tensors_of(engine, "generate", answer.fields, tokens=counts) if answer.fields else {}
        if ROUTES in values and engine.routers is not None:
            engine.routers.check(values[ROUTES])
        elif count and request.routes_from is not None and engine.routers is not None:
            problem = None if answer.stop is StopReason.INTERRUPTED else f"did not fill the field {ROUTES!r}"
        answer = replace(answer, fields={}, filled=[Filled(values, count)] if values else [])
    except ValueError as error:
        problem = str(error)
    require(engine, "generate", problem)
    return answer


async def ask_engine(setup: ConversationSetup, request: Request) -> Completion:
    """Return a turn of the policy; one that the context has cut ends with CONTEXT.

    Raises:
        RolloutError: The request failed, or the policy sampled what it cannot show.
    """
    ask: Ask = partial(_generate, setup.engine)
    if setup.gate is not None:
        ask = partial(setup.gate.ask, generate=ask)
    with setup.timer:
        answer = await (_until_stop(setup, request, ask) if request.sampling.stop else ask(request))
    if not len(answer.tokens) == len(answer.logps) == len(answer.versions):
        counts = f"{len(answer.tokens)} tokens, {len(answer.logps)} log-probs and {len(answer.versions)} versions"
        require(setup.engine, "generate", f"returned {counts}, expected as many of each")
    reader = setup.template.reader
    if reader is not None and not reader.placeholders.isdisjoint(answer.tokens):
        raise RolloutError("the policy sampled a token that stands for a picture, which it cannot show")
    is_full = len(request.tokens) + len(answer.tokens) >= setup.limits.context
    return replace(answer, stop=StopReason.CONTEXT) if is_full and answer.stop is StopReason.LENGTH else answer


def _check(setup: ConversationSetup, conversation: Conversation, session: ParticipantSession) -> None:
    """Compare the flat run with the template's own rendering of the conversation, and report where they differ.

    Texts are compared, not tokens: the policy may write a text in other tokens than the tokenizer would choose. Where
    nothing followed the policy's turn, there is nothing to compare.
    """
    if setup.check == "off" or conversation.error is not None or len(conversation.rewards) < 2:
        return
    try:
        rendered = setup.template.rendered(session.messages, conversation.prompt.tools)
    except RecipeError as error:  # as that of gpt-oss, which takes no turn with its own special tokens
        conversation.count("template_differs")
        conversation.error = str(error) if setup.check == "strict" else None
        return
    flat = setup.template.codec.decode(conversation.tokens)
    if rendered.startswith(flat) or (conversation.stop is StopReason.STOP and flat.startswith(rendered)):
        return
    conversation.count("template_differs")
    if setup.check == "strict":
        shorter = min(len(flat), len(rendered))
        index = next((i for i in range(shorter) if flat[i] != rendered[i]), shorter)
        before, after, rendered_after = flat[max(0, index - 20) : index], flat[index:], rendered[index:]
        conversation.error = (
            f"after {before!r} the conversation continues with {after[:20]!r}, but the template renders "
            f"{rendered_after[:20]!r}"
        )
