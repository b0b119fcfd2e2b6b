"""The other participants of conversations: tools, a user, an environment; and the boundary to their code."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import jsonschema

from rlkit.errors import RolloutError, explain, show
from rlkit.interfaces.environment import Environment, Observation
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.parser import ParsedTurn, ToolCall, ToolParser
from rlkit.interfaces.reward import as_number
from rlkit.interfaces.tool import State, Tool, ToolReply
from rlkit.rollout.conversation import Conversation
from rlkit.rollout.guard import GuardError, guard
from rlkit.types import JsonObject, Message, SampleKey

T = TypeVar("T")


class ParticipantError(RolloutError):
    """A user or an environment failed, which ends its conversation."""


@dataclass
class Participants:
    """All that may answer the policy in a run; a conversation without any is one turn.

    Args:
        tools: By the name that the policy calls them.
        parser: Reads calls out of the policy's turns; needed with tools.
        interaction: A simulated user.
        environment: Plays episodes.
    """

    tools: dict[str, Tool] = field(default_factory=dict)
    parser: ToolParser | None = None
    interaction: Interaction | None = None
    environment: Environment | None = None

    def __post_init__(self) -> None:
        for name, tool in self.tools.items():
            tool.name = name
        self.slots = {n: asyncio.Semaphore(t.concurrency) for n, t in self.tools.items() if t.concurrency is not None}

    def schemas(self) -> list[JsonObject]:
        """Return the tools as a chat template shows them."""
        return [
            {
                "type": "function",
                "function": {"name": name, "description": tool.description, "parameters": tool.parameters},
            }
            for name, tool in self.tools.items()
        ]

    @asynccontextmanager
    async def open_session(self, conversation: Conversation, key: SampleKey) -> AsyncIterator[ParticipantSession]:
        """Open one conversation's states and close them, however it ends."""
        session = ParticipantSession(self, conversation, key)
        try:
            yield session
        finally:
            await session.close()


class ParticipantSession:
    """One conversation's side of its participants."""

    def __init__(self, participants: Participants, conversation: Conversation, key: SampleKey) -> None:
        self.participants = participants
        self.conversation = conversation
        self.key = key
        self.messages: list[Message] = list(conversation.prompt.messages)
        self._states: dict[str, State] = {}
        self._user: State = {}
        self._episode: State = {}
        self._started: list[str] = []

    async def open(self) -> None:
        """Prepare all states; an environment's first observation becomes a user's message.

        Raises:
            ParticipantError: The user or the environment failed.
            RolloutError: A tool could not prepare its state.
        """
        for name, tool in self.participants.tools.items():
            state = self._states[name] = {}
            _, problem = await _bounded(partial(self._enter, name, "create", tool.create, state), tool.timeout)
            if problem is not None:
                raise RolloutError(f"tool {name!r} cannot begin: {problem}")
        prompt = self.conversation.prompt
        if (user := self.participants.interaction) is not None:
            self._started.append("interaction")
            await _participant(user, lambda: user.start(prompt, self._user))
        if (environment := self.participants.environment) is not None:
            self._started.append("environment")
            seed = SampleKey(self.key.seed, self.key.step, self.key.prompt, 0).hash()
            observed = await _participant(environment, lambda: environment.reset(prompt, seed, self._episode), str)
            self.messages.append({"role": "user", "content": observed})

    def read(self, text: str) -> ParsedTurn:
        """Return the calls of the policy's turn; those that it only thinks of do not count.

        Raises:
            ParticipantError: The parser raised.
        """
        if self.participants.parser is None or not self.participants.tools:
            return ParsedTurn(text)
        try:
            return self.participants.parser.parse(text.rpartition("</think>")[2])
        except Exception as error:  # foreign code may raise anything
            raise ParticipantError(f"{type(self.participants.parser).__name__}: {explain(error)}") from error

    async def call(self, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls of a turn concurrently; errors are returned to the policy and counted."""
        replies = await asyncio.gather(*(self._call(call) for call in calls))
        for reply in replies:
            self._reward(reply.reward)
        return [
            {"role": "tool", "name": call.name, "tool_call_id": f"call{i:05d}", "content": reply.text}
            for i, (call, reply) in enumerate(zip(calls, replies, strict=True))
        ]

    async def answer(self, text: str) -> tuple[list[Message], bool]:
        """Return the reply of the environment or the user to the policy's turn, and whether it ends the conversation.

        Raises:
            ParticipantError: It failed.
        """
        if (environment := self.participants.environment) is not None:
            seen = await _participant(environment, lambda: environment.step(text, self._episode), Observation)
            self.conversation.reward(_number(seen.reward))
            return [{"role": "user", "content": seen.text}], seen.done
        user = self.participants.interaction
        if user is None:
            return [], True
        reply = await _participant(user, lambda: user.reply(self.messages, self._user), Reply)
        self.conversation.reward(_number(reply.reward))
        return _messages(user, reply.messages), reply.done

    async def add_tool_rewards(self) -> None:
        """Collect the tools' rewards of the whole conversation."""
        for name, tool in self.participants.tools.items():
            state = self._states[name]
            value, problem = await _bounded(partial(self._enter, name, "reward", tool.reward, state), tool.timeout)
            if problem is None:
                self._reward(value)
            else:
                self.conversation.count("tool_errors")

    async def close(self) -> None:
        """Release all states; what goes wrong is counted."""
        work: list[tuple[Callable[[], Awaitable[None]], float]] = []
        for name, state in self._states.items():
            tool = self.participants.tools[name]
            work.append((partial(self._enter, name, "release", tool.release, state), tool.timeout))
        if self.participants.interaction is not None and "interaction" in self._started:
            work.append(
                (partial(self.participants.interaction.finish, self._user), self.participants.interaction.timeout)
            )
        if self.participants.environment is not None and "environment" in self._started:
            work.append(
                (partial(self.participants.environment.finish, self._episode), self.participants.environment.timeout)
            )
        for done, timeout in work:
            _, problem = await _bounded(done, timeout)
            if problem is not None:
                self.conversation.count("release_errors")

    def _reward(self, value: Any) -> None:
        """Take a tool's reward; one that is no number is counted and does not count."""
        try:
            self.conversation.reward(_number(value))
        except ParticipantError:
            self.conversation.count("tool_errors")

    def _enter(self, name: str, phase: str, method: Callable[..., Awaitable[T]], *positional: Any) -> Awaitable[T]:
        """Call a tool's method with the arguments that the row of the data has for the phase.

        Raises:
            ValueError: The row has no object there.
        """
        given: Any = self.conversation.prompt.meta.get("tools")
        for key in (name, phase):
            if not isinstance(given, Mapping | None):
                break
            given = (given or {}).get(key)
        if not isinstance(given, Mapping | None):
            raise ValueError(f"the row's tools.{name}.{phase} is {show(given)}, expected an object")
        return method(*positional, **(given or {}))

    async def _call(self, call: ToolCall) -> ToolReply:
        problem = call.error or self._refuse(call)
        if problem is None:
            tool = self.participants.tools[call.name]
            state = self._states[call.name]
            work = partial(self._enter, call.name, "call", tool.call, call.arguments, state)
            slot = self.participants.slots.get(call.name)
            if slot is None:
                found, problem = await _bounded(work, tool.timeout)
            else:
                async with slot:  # the deadline counts from here
                    found, problem = await _bounded(work, tool.timeout)
            if problem is None:
                return found if isinstance(found, ToolReply) else ToolReply(str(found))
        self.conversation.count("tool_errors")
        return ToolReply(f"error: {problem}")

    def _refuse(self, call: ToolCall) -> str | None:
        """Return why a call cannot be made as it was written."""
        tools = self.participants.tools
        if call.name not in tools:
            return f"there is no tool {call.name!r}; tools: {', '.join(tools)}"
        try:
            jsonschema.validate(call.arguments, tools[call.name].parameters)
        except jsonschema.ValidationError as error:
            place = "/".join(map(str, error.absolute_path))
            return f"the arguments of {call.name} do not fit its schema: {place}{': ' if place else ''}{error.message}"
        return None


async def _bounded(work: Callable[[], Awaitable[T]], timeout: float) -> tuple[T | None, str | None]:
    """Call and await foreign code within its deadline; return its value, or what went wrong."""
    try:
        return await guard(work, timeout), None
    except GuardError as error:
        return None, str(error)


async def _participant(
    participant: Interaction | Environment, work: Callable[[], Awaitable[T]], expected: type | None = None
) -> T:
    value, problem = await _bounded(work, participant.timeout)
    if problem is None and expected is not None and not isinstance(value, expected):
        problem = f"it returned {show(value)}, expected {expected.__name__}"
    if problem is not None:
        raise ParticipantError(f"{type(participant).__name__}: {problem}")
    return value  # type: ignore[return-value]


def _messages(user: Interaction, given: Any) -> list[Message]:
    """Return a user's messages.

    Raises:
        ParticipantError: They are none.
    """
    known = isinstance(given, Sequence) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in given)
    if not known:
        raise ParticipantError(
            f"{type(user).__name__}: it replied {show(given)}, expected messages with role and content"
        )
    return list(given)


def _number(value: Any) -> float:
    """Return a reward as a number.

    Raises:
        ParticipantError: It is none, or not finite.
    """
    try:
        return as_number(value)
    except Exception as error:  # foreign objects may raise anything
        raise ParticipantError(f"a reward of {show(value)} was given, expected a finite number") from error
