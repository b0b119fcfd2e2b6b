"""Participants of a conversation besides the policy: tools, a user, an environment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from rlkit.base.deadlines import slot
from rlkit.base.errors import RolloutError, show
from rlkit.base.tasks import run_concurrently
from rlkit.base.text import part_name
from rlkit.interfaces import outputs
from rlkit.interfaces.content import content_of
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.fields import tensors_of
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser, parse_after_thinking
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.tool import Content, State, Tool, ToolReply
from rlkit.parsers.arguments import with_types
from rlkit.rollout.conversation import Conversation
from rlkit.rollout.guard import GuardError, errors_of, guard
from rlkit.rollout.loop import warn_on_stderr
from rlkit.types import JsonObject, Message, SampleKey

T = TypeVar("T")

FAILED_CALLS = 8
"""Calls of a tool that fail before any succeeds, until a warning."""

TEXT_ALONE = "; the model of this run reads text alone"


class ParticipantError(RolloutError):
    """A user or an environment failed, which ends its conversation."""


@dataclass
class Participants:
    """All parts that may answer the policy in a run; a conversation without any has one turn.

    Args:
        tools: By the name that the policy calls them.
        parser: Reads calls out of the policy's turns; needed with tools.
        interaction: A simulated user.
        environment: Plays episodes.
        pictures: Whether the policy reads pictures.
        note: Shows a warning.
        failures: How often each has failed, by its name and the metric that counts it.
    """

    tools: dict[str, Tool] = field(default_factory=dict)
    parser: ToolParser | None = None
    interaction: Interaction | None = None
    environment: Environment | None = None
    pictures: bool = False
    note: Callable[[str], None] = warn_on_stderr
    failures: Counter[tuple[str, str]] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        for name, tool in self.tools.items():
            tool.name = name
        self._slots = {n: asyncio.Semaphore(t.concurrency) for n, t in self.tools.items() if t.concurrency is not None}

    def schemas(self) -> list[JsonObject]:
        """Return the tools as a chat template shows them."""
        return [
            {"type": "function", "function": {"name": t.name, "description": t.description, "parameters": t.parameters}}
            for t in self.tools.values()
        ]

    def failed(self, failure: GuardError, name: str, metric: str, patience: int = 1) -> None:
        """Warn once of what failed in each of its first `patience` calls: its errors end no conversation."""
        self.failures[name, metric] += 1
        if self.failures[name, metric] == patience:
            calls = f", in each of {patience} calls" if patience > 1 else ""
            self.note(f"warning: {failure}{calls}; counted as conversation/{metric}")

    def slot(self, tool: str) -> AbstractAsyncContextManager[None]:
        """Hold one of a tool's `concurrency` calls; the wait for it counts in no deadline."""
        slots = self._slots.get(tool)
        return nullcontext() if slots is None else slot(slots)


class ParticipantSession:
    """One conversation's side of its participants; a context that closes their states, however it ends."""

    def __init__(self, participants: Participants, conversation: Conversation, key: SampleKey) -> None:
        self.participants = participants
        self.conversation = conversation
        self.key = key
        self.messages: list[Message] = list(conversation.prompt.messages)
        self._openings: dict[int, str] = {}
        chosen = conversation.prompt.tool_names
        self.tools = {n: tool for n, tool in participants.tools.items() if chosen is None or n in chosen}
        self._states: dict[str, State] = {}
        self._user: State = {}
        self._episode: State = {}
        self._releases: list[tuple[Callable[[], Awaitable[None]], Tool | Interaction | Environment]] = []

    async def __aenter__(self) -> ParticipantSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def open(self) -> list[Message]:
        """Prepare all states; return an environment's first observation as a user's message.

        Raises:
            ParticipantError: The user or the environment failed.
            RolloutError: A tool could not prepare its state.
        """
        prompt = self.conversation.prompt
        for name, tool in self.tools.items():
            state = self._states[name] = {}
            self._releases.append((partial(self._enter, name, "release", tool.release, state), tool))
            try:
                await guard(partial(self._enter, name, "create", tool.create, state), tool, method="create")
            except GuardError as error:
                raise RolloutError(f"tool {name!r} cannot begin for prompt {prompt.id!r}: {error.problem}") from error
        user = self.participants.interaction
        if user is not None:
            self._releases.append((partial(user.finish, self._user), user))
            await _participant(user, "start", lambda: user.start(prompt, self._user))
        environment = self.participants.environment
        if environment is not None:
            self._releases.append((partial(environment.finish, self._episode), environment))
            seed = SampleKey(self.key.seed, self.key.step, self.key.prompt, 0).hash()
            expected = object if self.participants.pictures else str
            reset = partial(environment.reset, prompt, seed, self._episode)
            observed = await _participant(environment, "reset", reset, expected)
            return self._observation(environment, observed)
        return []

    def add_turn(self, content: str, opened: str) -> None:
        """Add the policy's turn to the messages; `opened` is what the prompt has begun its thinking with, or empty."""
        self._openings[len(self.messages)] = opened
        self.messages.append({"role": "assistant", "content": content})

    def read(self, text: str, opened: str = "") -> ParsedTurn:
        """Return the calls of the policy's turn; those in its thinking do not count.

        Args:
            text: The turn.
            opened: What the prompt has begun the turn's thinking with, if it has.

        Raises:
            ParticipantError: The parser failed.
        """
        parser = self.participants.parser
        if parser is None or not self.tools:
            return ParsedTurn(text)
        try:
            with errors_of(parser, "parse"):
                turn = parse_after_thinking(parser, text, opened)[1]
        except GuardError as error:
            raise ParticipantError(str(error)) from error
        schemas = {name: tool.parameters for name, tool in self.tools.items()}
        return replace(turn, calls=[with_types(call, schemas.get(call.name)) for call in turn.calls])

    async def call(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Make the calls of a turn, all at once; an error is counted and becomes the result that the policy reads."""
        replies = await run_concurrently(*(self._call(call) for call in calls))
        for call, reply in zip(calls, replies, strict=True):
            self._reward(reply.reward)
            if reply.fields or reply.metrics:
                try:
                    self._take(self.tools[call.name], "call", f"tool/{call.name}", reply)
                except ParticipantError:
                    self.conversation.count("tool_errors")
        return [
            {"role": "tool", "name": call.name, "tool_call_id": f"call{i:05d}", "content": reply.text}
            for i, (call, reply) in enumerate(zip(calls, replies, strict=True))
        ]

    async def answer(self, text: str) -> tuple[list[Message], bool]:
        """Return the answer of the environment or the user to the policy's turn, and whether it is the last.

        They read each turn with the opening of its thinking, even if the prompt has begun it.

        Raises:
            ParticipantError: It failed.
        """
        environment = self.participants.environment
        if environment is not None:
            step = partial(environment.step, text, self._episode)
            observation = await _participant(environment, "step", step, Observation)
            self.conversation.reward(_number(observation.reward, environment, "step"))
            self._take(environment, "step", "environment", observation)
            return self._observation(environment, observation.text), observation.done
        user = self.participants.interaction
        if user is None:
            return [], True
        messages = [
            {**message, "content": opened + message["content"]} if (opened := self._openings.get(i)) else message
            for i, message in enumerate(self.messages)
        ]
        reply = await _participant(user, "reply", partial(user.reply, messages, self._user), Reply)
        self.conversation.reward(_number(reply.reward, user, "reply"))
        self._take(user, "reply", "interaction", reply)
        return _messages(user, reply.messages, self.participants.pictures), reply.done

    def _observation(self, environment: Environment, observed: object) -> list[Message]:
        """Return an observation as a user's message.

        Raises:
            ParticipantError: It holds a part that the policy does not read.
        """
        try:
            return [{"role": "user", "content": _content(observed, self.participants.pictures)}]
        except ValueError as error:
            reads = "" if self.participants.pictures else TEXT_ALONE
            raise ParticipantError(f"{part_name(environment)}: {error}{reads}") from error

    async def add_tool_rewards(self) -> None:
        """Add the tools' rewards of the whole conversation."""
        for name, tool in self.tools.items():
            try:
                enter = partial(self._enter, name, "reward", tool.reward, self._states[name])
                value = await guard(enter, tool, method="reward")
            except GuardError:
                self.conversation.count("tool_errors")
            else:
                self._reward(value)

    async def close(self) -> None:
        """Release all states; errors are counted."""
        for release, part in self._releases:
            try:
                await guard(release, part)
            except GuardError as error:
                self.conversation.count("release_errors")
                self.participants.failed(error, part_name(part), "release_errors")

    def _reward(self, value: object) -> None:
        """Take a tool's reward; one that is no number is counted and does not count."""
        try:
            self.conversation.reward(as_number(value))
        except Exception:  # foreign objects may raise anything
            self.conversation.count("tool_errors")

    def _take(
        self, part: Tool | Interaction | Environment, method: str, prefix: str, reply: ToolReply | Observation | Reply
    ) -> None:
        """Take the fields and the metrics of a reply.

        Raises:
            ParticipantError: A value is not what its field declares, or a metric is no number by a plain name.
            PartError: The part does not declare a field.
        """
        try:
            problem = outputs.of_metrics(reply.metrics)
            if problem is not None:
                raise ValueError(problem)
            self.conversation.fill(tensors_of(part, method, reply.fields))
            for name, value in reply.metrics.items():
                self.conversation.metrics.setdefault(f"{prefix}/{name}", []).append(as_number(value))
        except ValueError as error:
            raise ParticipantError(str(GuardError(part, f"`{method}` {error}", method))) from error

    def _enter(self, name: str, phase: str, method: Callable[..., Awaitable[T]], *positional: object) -> Awaitable[T]:
        """Call a tool's method with the arguments that the row of the data has for the phase.

        Raises:
            ValueError: The row has no object there.
        """
        tools: object = self.conversation.prompt.meta.get("tools")
        arguments = tools.get(name) if isinstance(tools, Mapping) else None  # names and schemas have no arguments
        if isinstance(arguments, Mapping):
            arguments = arguments.get(phase)
        if not isinstance(arguments, Mapping | None):
            raise ValueError(f"the row's tools.{name}.{phase} is {show(arguments)}, expected an object")
        return method(*positional, **(arguments or {}))

    async def _call(self, call: ToolCall) -> ToolReply:
        problem = call.error
        if problem is None:
            try:
                problem = self._refuse(call)
                if problem is None:
                    tool, state = self.tools[call.name], self._states[call.name]
                    enter = partial(self._enter, call.name, "call", tool.call, call.arguments, state)
                    async with self.participants.slot(call.name):
                        answer = await guard(enter, tool, method="call")
                    with errors_of(tool, "call"):  # its text may be any object
                        reply = answer if isinstance(answer, ToolReply) else ToolReply(answer)
                        reply = reply._replace(text=_content(reply.text, self.participants.pictures))
                        self.participants.failures[call.name, "tool_errors"] = FAILED_CALLS  # none is warned of now
                        return reply
            except GuardError as error:
                problem = error.problem
                self.participants.failed(error, call.name, "tool_errors", FAILED_CALLS)
        self.conversation.count("tool_errors")
        return ToolReply(f"error: {problem}")

    def _refuse(self, call: ToolCall) -> str | None:
        """Return the reason why a call cannot be made as it was written; None if it can.

        Raises:
            GuardError: The tool's schema is none.
        """
        if call.name not in self.tools:
            return f"there is no tool {call.name!r}; tools: {', '.join(self.tools)}"
        import jsonschema

        with errors_of(self.tools[call.name]):
            try:
                jsonschema.validate(call.arguments, self.tools[call.name].parameters)
            except jsonschema.ValidationError as error:
                path = "/".join(map(str, error.absolute_path))
                where = f"{path}{': ' if path else ''}"
                return f"the arguments of {call.name} do not fit its schema: {where}{error.message}"
        return None


async def _participant(
    participant: Interaction | Environment, method: str, work: Callable[[], Awaitable[T]], expected: type | None = None
) -> T:
    try:
        return await guard(work, participant, expected, method)
    except GuardError as error:
        raise ParticipantError(str(error)) from error


def _content(value: object, pictures: bool) -> Content:
    """Convert the reply of a tool or an environment: a text, or typed parts if these hold pictures.

    Raises:
        ValueError: A part is neither, or is a picture that the policy does not read.
    """
    typed = isinstance(value, list) and any(isinstance(part, Mapping) and "type" in part for part in value)
    content = content_of(value, pictures) if typed else value
    return content if isinstance(content, list) and typed else str(content)


def _messages(user: Interaction, reply: object, pictures: bool) -> list[Message]:
    """Return a user's messages.

    Raises:
        ParticipantError: They are not messages.
    """
    if not isinstance(reply, Sequence) or not all(
        isinstance(message, dict) and {"role", "content"} <= message.keys() for message in reply
    ):
        problem = f"it replied {show(reply)}, expected messages with role and content"
        raise ParticipantError(str(GuardError(user, problem, "reply")))
    try:
        return [{**message, "content": content_of(message["content"], pictures)} for message in reply]
    except ValueError as error:
        reads = "" if pictures else TEXT_ALONE
        raise ParticipantError(f"{part_name(user)}: it replied with {error}{reads}") from error


def _number(value: object, part: Interaction | Environment, method: str) -> float:
    """Return a reward as a number.

    Raises:
        ParticipantError: It is none, or not finite.
    """
    try:
        return as_number(value)
    except Exception as error:  # foreign objects may raise anything
        problem = f"a reward is {show(value)}, expected a finite number"
        raise ParticipantError(str(GuardError(part, problem, method))) from error
