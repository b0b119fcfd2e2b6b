"""Rollouts by agents: an agent's requests are answered by the engine, and what the policy sampled becomes samples."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from rlkit.base.deadlines import deadline, queued
from rlkit.base.errors import RecipeError, RolloutError, shorten, show
from rlkit.base.folders import remove
from rlkit.base.names import source_name
from rlkit.base.tasks import cancel
from rlkit.base.text import part_name, safe
from rlkit.interfaces.agent import Agent, AgentResult, AgentTask
from rlkit.interfaces.content import pictures_of
from rlkit.interfaces.fields import assemble, tensors_of
from rlkit.interfaces.gateway import MODEL, Gateway, GatewaySession, Sample, SessionLimits
from rlkit.interfaces.parser import ParsedTurn, ToolParser, parse_after_thinking
from rlkit.parsers.arguments import with_types
from rlkit.recipe import ConversationLimits
from rlkit.registry.shelf import provider
from rlkit.rollout.cache import SizedCache
from rlkit.rollout.collect import ConversationSetup, ask_engine
from rlkit.rollout.dialogue import Dialogue
from rlkit.rollout.guard import GuardError, errors_of
from rlkit.rollout.loop import warn_on_stderr
from rlkit.rollout.template import ChatTemplate
from rlkit.types import (
    AgentSpan,
    Completion,
    JsonObject,
    Media,
    Message,
    Prompt,
    Rendered,
    Request,
    SampleKey,
    StopReason,
    Trajectory,
)

KEPT_TEMPLATES = 8
"""Sets of tools whose templates are kept; an agent may describe others in each request."""
MAX_PROBLEMS = 5
"""Different errors of an agent's code that are shown."""
LONGEST_OUTPUT = 4000
"""Characters of an agent's output in an error."""


@dataclass
class TemplateBackend:
    """The policy of one rollout, as its session asks for it.

    Args:
        setup: The engine and how it is used.
        dialogue: The tokenizer and its chat template.
        parser: Reads calls of tools; None if none fits the chat template.
        key: Of the rollout.
    """

    setup: ConversationSetup
    dialogue: Dialogue
    parser: ToolParser | None
    key: SampleKey

    def __post_init__(self) -> None:
        self.context = self.setup.limits.context
        self._templates: SizedCache[ChatTemplate] = SizedCache(KEPT_TEMPLATES, lambda _: 1)
        self._asking = 0

    def render(self, messages: Sequence[Message], tools: Sequence[JsonObject], after: Completion | None) -> Rendered:
        """Return messages as the policy reads them; they hold no special tokens, whatever the agent writes."""
        if tools and self.parser is None:
            raise RecipeError(self.dialogue.missing_parser)
        template = self._template(tools)
        if template.reader is None and pictures_of(messages):
            raise RecipeError("the messages hold pictures, but the policy reads texts alone; send texts")
        codec = template.codec
        plain = [codec.plain(message) for message in messages]
        if after is None:
            return template.render_start(plain)
        return template.render_delta(plain, after.tokens[-1])

    async def sample(
        self, tokens: Sequence[int], max_tokens: int | None, label: str, media: Media | None = None
    ) -> Completion:
        setup, gate = self.setup, self.setup.gate
        room = self.context - len(tokens)
        budget = min(limit for limit in (setup.sampling.max_tokens, max_tokens, room) if limit is not None)
        key = self.key._replace(prompt=f"{self.key.prompt}/{label}")
        session = f"{self.key.step}/{self.key.prompt}/{self.key.sample}"
        sampling, routes_from = setup.sampling.within(budget), 0 if setup.asks_routes else None
        request = Request(tuple(tokens), sampling, key, session, media, continues=True, routes_from=routes_from)
        if gate is not None and self._asking:
            gate.count(1)  # the gate counts a conversation once: it is busy while none of its requests waits
        self._asking += 1
        try:
            with queued():
                completion = await ask_engine(setup, request)
        finally:
            self._asking -= 1
            if gate is not None and self._asking:
                gate.count(-1)
        if not completion.tokens:
            raise RolloutError("the engine returned no tokens")
        return completion

    def text(self, tokens: Sequence[int]) -> str:
        return self.dialogue.template.codec.turn(tokens, special=True)

    def read(self, text: str, tools: Sequence[JsonObject], prompt: Sequence[int]) -> ParsedTurn:
        codec = self.dialogue.template.codec
        if not tools or self.parser is None:
            return ParsedTurn(codec.plain(text))
        with errors_of(self.parser, "parse"):
            thinking, turn = parse_after_thinking(self.parser, text, codec.opened_thinking(prompt))
        functions = [tool["function"] for tool in tools]
        schemas = {function["name"]: function.get("parameters") for function in functions}
        calls = [with_types(call, schemas.get(call.name)) for call in turn.calls]
        return ParsedTurn(codec.plain(thinking + turn.text), calls)

    def _template(self, tools: Sequence[JsonObject]) -> ChatTemplate:
        base = self.dialogue.template
        if not tools:
            return base
        return self._templates.get(
            json.dumps(tools, sort_keys=True),
            lambda: ChatTemplate(
                base.tokenizer, base.stop_ids, base.codec.plain(list(tools)), base.kwargs, base.reader
            ),
        )


class SessionClient:
    """An agent's way to its session."""

    def __init__(self, session: GatewaySession, url: str, speaker: int = 0) -> None:
        self.url = url
        self.key = session.id
        self.model = MODEL
        self.session = session
        self.speaker = speaker
        self.roles: list[SessionRole] = []

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the policy's next message, as OpenAI's chat completions have it."""
        return await self.session.chat(messages, tools, max_tokens, self.speaker)

    def role(self, name: str) -> SessionRole:
        """Return a new conversation in a role."""
        self.roles.append(
            SessionRole(source_name(name) or "_", SessionClient(self.session, self.url, len(self.roles) + 1))
        )
        return self.roles[-1]


@dataclass
class SessionRole:
    """One role's conversation in a session.

    Args:
        name: Of the role.
        client: Asks as this role.
        reward: What the agent sets.
    """

    name: str
    client: SessionClient
    reward: float | None = None

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[JsonObject] = (), max_tokens: int | None = None
    ) -> Message:
        """Return the policy's next message in this role."""
        return await self.client.chat(messages, tools, max_tokens)

    def problem(self) -> str | None:
        """Return the problem with the reward; None if it is a finite number."""
        if isinstance(self.reward, int | float) and isfinite(self.reward):
            return None
        return f"role {self.name!r} has reward {show(self.reward)}, expected a finite number: the agent sets it"


class AgentHost:
    """Runs a recipe's agent, each rollout with a session and a folder of its own.

    Args:
        agent: The part.
        dialogue: What conversations are made with.
        limits: The recipe's limits of conversations.
        note: Shows a warning.
    """

    def __init__(
        self, agent: Agent, dialogue: Dialogue, limits: ConversationLimits, note: Callable[[str], None] = warn_on_stderr
    ) -> None:
        self.agent = agent
        self.dialogue = dialogue
        self.limits = limits
        self.note = note
        self.gateway = provider(Gateway)()  # type: ignore[type-abstract]
        self._problems: set[str] = set()
        self._root: Path | None = None

    async def converse(self, setup: ConversationSetup, prompt: Prompt, group: int, sample: int) -> Trajectory:
        """Return one rollout: its main sample, with the others as `branches`."""
        key = SampleKey(setup.seed, setup.step, f"{group}/{prompt.id}", sample, setup.attempt)
        async with setup.admission:
            await self.gateway.start()
            if self._root is None:
                self._root = Path(tempfile.mkdtemp(prefix="rlkit-agents-"))
            name = safe(f"{key.step}-{key.prompt}-{key.sample}").replace("/", "_").replace(" ", "_")[:60]
            folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self._root))
            try:
                trajectory = await self._rollout(setup, prompt, key, folder)
            except BaseException:
                await asyncio.to_thread(remove, folder)
                raise
            if trajectory.error is not None:
                await self.release([trajectory])
        trajectory.group = group
        return trajectory

    async def release(self, trajectories: Sequence[Trajectory]) -> None:
        """Remove the folders of rollouts that have been scored, or move them to where the agent keeps them."""
        for trajectory in trajectories:
            if "folder" in trajectory.agent:
                await asyncio.to_thread(_remove, Path(trajectory.agent["folder"]), self.agent.keep)

    async def close(self) -> None:
        """End all sessions, stop the server and remove all folders."""
        await self.gateway.close()
        if self._root is not None:
            await asyncio.to_thread(remove, self._root)
            self._root = None

    async def _rollout(self, setup: ConversationSetup, prompt: Prompt, key: SampleKey, folder: Path) -> Trajectory:
        backend = TemplateBackend(setup, self.dialogue, self.dialogue.participants.parser, key)
        limits = SessionLimits(self.limits.turns, self.limits.tokens, self.limits.tool_calls)
        seconds = min(limit for limit in (self.agent.timeout, self.limits.seconds) if limit is not None)
        seed = SampleKey(key.seed, key.step, key.prompt, 0).hash()
        result, client = await self._run(AgentTask(prompt, folder, seed), backend, limits, seconds)
        session, samples = client.session, client.session.samples()
        counts = {**session.counts, "agent_failed": int(result.status != 0), "forks": session.forks}
        trajectory = self._trajectory(prompt, samples, counts)
        _assign_roles(trajectory, samples, client.roles)
        trajectory.span.result = {"folder": str(folder), "status": result.status, "output": result.output}
        try:
            by_row = tensors_of(self.agent, "run", result.fields)
            for row, sample in zip(trajectory.samples, samples, strict=False):
                row.fields = assemble(setup.fields, sample.filled, len(sample.tokens)) | by_row
        except ValueError as error:
            trajectory.error = f"{part_name(self.agent)}: {error}"
        if session.error is not None:
            trajectory.error = session.error
        elif not samples:
            trajectory.error = (
                f"{part_name(self.agent)}: it asked the policy for no turn and ended with status {result.status}; "
                f"its output: {shorten(result.output[-LONGEST_OUTPUT:])}"
            )
        return trajectory

    async def _run(
        self, task: AgentTask, backend: TemplateBackend, limits: SessionLimits, seconds: float
    ) -> tuple[AgentResult, SessionClient]:
        """Run the agent to its end or its deadline; return how it ended, and its client, whose session is closed."""
        try:
            async with deadline(seconds):
                session = self.gateway.open(backend, limits)  # its requests stop the clock of this deadline
                client = SessionClient(session, self.gateway.url)
                running = asyncio.ensure_future(self.agent.run(task, client))
                failing = asyncio.ensure_future(session.failed.wait())
                try:
                    await asyncio.wait((running, failing), return_when=asyncio.FIRST_COMPLETED)
                    with errors_of(self.agent, "run"):
                        result = AgentResult(1) if session.fatal else await running
                        if not isinstance(result, AgentResult):
                            raise TypeError(f"it returned {show(result)}, expected AgentResult")
                finally:
                    await self.gateway.end(session)
                    await cancel(running)
                    await cancel(failing)
        except TimeoutError:
            session.counts["agent_timeouts"] += 1
            result = AgentResult(-9, f"it did not finish within {seconds:g} s")
        except GuardError as error:
            result = AgentResult(1, error.problem)
            self._warn(str(error))
        if session.fatal is not None:
            raise session.fatal
        return result, client

    def _warn(self, problem: str) -> None:
        """Show each of the first problems of the agent once."""
        if problem not in self._problems and len(self._problems) < MAX_PROBLEMS:
            self._problems.add(problem)
            self.note(f"warning: {problem}; its rollout is scored as it is, and counted as conversation/agent_failed")

    def _trajectory(self, prompt: Prompt, samples: Sequence[Sample], counts: Mapping[str, int]) -> Trajectory:
        """Return the main sample as a trajectory, which has the others as branches."""
        if not samples:
            return Trajectory(prompt, 0, [], [], [], [], StopReason.ERROR, counts=dict(counts))
        main, *branches = [self._of_sample(prompt, sample) for sample in samples]
        start = len(prompt.messages)
        if main.messages[:start] != prompt.messages:  # the reward reads those after the prompt's
            main.messages = prompt.messages + main.messages
        main.span.branches = branches
        main.counts = {**counts, "branches": len(samples) - len({sample.speaker for sample in samples})}
        return main

    def _of_sample(self, prompt: Prompt, sample: Sample) -> Trajectory:
        return Trajectory(
            prompt,
            0,
            sample.tokens,
            sample.mask,
            sample.logps,
            sample.versions,
            sample.stop,
            sample.turns,
            self.dialogue.template.codec.turn(sample.last, special=False),
            turn_rewards=[0.0 for turn in sample.turns if turn.role == "assistant"],
            messages=list(sample.messages),
            media=Media.of(sample.media),
            span=AgentSpan(fork=sample.fork, positions=sample.positions),
            candidates=sample.candidates if any(sample.candidates) else [],
        )


def _assign_roles(trajectory: Trajectory, samples: Sequence[Sample], roles: Sequence[SessionRole]) -> None:
    """Set the role of each sample, and its reward at the last turn; a role without a reward fails the rollout."""
    for row, sample in zip(trajectory.samples, samples, strict=False):
        if sample.speaker:
            role = roles[sample.speaker - 1]
            row.span.role, row.span.speaker = role.name, sample.speaker
            trajectory.error = trajectory.error or role.problem()
            row.turn_rewards[-1] = 0.0 if role.problem() else float(role.reward or 0.0)


def _remove(folder: Path, keep: str | None) -> None:
    with suppress(OSError):
        if keep is not None:
            Path(keep).mkdir(parents=True, exist_ok=True)
            shutil.move(folder, Path(keep) / folder.name)
    remove(folder)
