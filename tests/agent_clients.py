"""Agents that hold one conversation by the official clients, each in the form of its API."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from rlkit_agents.server import ChatGateway
from rlkit_agents.session import AgentSession

from rlkit.interfaces.gateway import SessionLimits
from tests.fake_policy import FakePolicy

if TYPE_CHECKING:  # each client takes seconds to import
    import anthropic
    import openai
    from pydantic import TypeAdapter

T = TypeVar("T")


@asynccontextmanager
async def serving(*texts: str, limits: SessionLimits | None = None) -> AsyncIterator[tuple[ChatGateway, AgentSession]]:
    """Serve a session of a policy that writes these texts."""
    gateway = ChatGateway()
    await gateway.start()
    try:
        yield gateway, gateway.open(FakePolicy(*texts), limits or SessionLimits())
    finally:
        await gateway.close()


def run(
    test: Callable[[ChatGateway, AgentSession], Awaitable[T]], *texts: str, limits: SessionLimits | None = None
) -> T:
    """Return what a test of a served session returns."""

    async def serve() -> T:
        async with serving(*texts, limits=limits) as (gateway, session):
            return await test(gateway, session)

    return asyncio.run(serve())


def chat_client(gateway: ChatGateway, key: str, **options: Any) -> openai.AsyncOpenAI:
    import openai

    http = openai.DefaultAsyncHttpxClient(verify=False)
    return openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key=key, http_client=http, **options)


def message_client(gateway: ChatGateway, key: str) -> anthropic.AsyncAnthropic:
    import anthropic

    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    return anthropic.AsyncAnthropic(base_url=gateway.url, api_key=key, http_client=http)


@dataclass(frozen=True)
class Said:
    """A message in no API's form: the user's, the policy's with its calls, or results of tools by the calls' ids."""

    role: str
    text: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    results: tuple[tuple[str, str], ...] = ()
    response: str = ""


@dataclass(frozen=True)
class Ask:
    """A request in no API's form; `blocks` writes texts as lists of blocks, `recall` names the last response."""

    said: tuple[Said, ...]
    system: str = ""
    tools: tuple[str, ...] = ()
    max_tokens: int = 500
    blocks: bool = False
    stream: bool = False
    retry: bool = False
    recall: bool = False


class Asker(ABC):
    """Sends requests of sessions by a provider's client, with one client for all sessions."""

    def __init__(self, gateway: ChatGateway) -> None:
        self.gateway = gateway
        self.client = self.connect(gateway)

    @abstractmethod
    def connect(self, gateway: ChatGateway) -> Any: ...

    @abstractmethod
    async def send(self, ask: Ask, **options: Any) -> Said: ...

    async def ask(self, session: AgentSession, ask: Ask) -> Said:
        retried = {"x-stainless-retry-count": "1"} if ask.retry else {}
        return await self.send(ask, extra_headers={"Authorization": f"Bearer {session.id}", **retried})


def schema(name: str) -> dict[str, Any]:
    return {"type": "object", "properties": {name: {"type": "integer"}}}


def texts(text: str, kind: str = "text") -> list[dict[str, str]]:
    """Return a text as two blocks."""
    return [{"type": kind, "text": part} for part in (text[:1], text[1:])]


class ChatAsker(Asker):
    def connect(self, gateway: ChatGateway) -> Any:
        return chat_client(gateway, "none")

    async def send(self, ask: Ask, **options: Any) -> Said:
        from openai.lib.streaming.chat import ChatCompletionStreamState
        from openai.types.chat import ChatCompletion, ChatCompletionChunk

        def content(text: str) -> Any:
            return texts(text) if ask.blocks else text

        messages: list[Any] = [{"role": "system", "content": content(ask.system)}] if ask.system else []
        for said in ask.said:
            if said.role == "assistant":
                calls = [
                    {"id": i, "type": "function", "function": {"name": name, "arguments": arguments}}
                    for i, name, arguments in said.calls
                ]
                messages.append(
                    {"role": "assistant", "content": said.text or None, **({"tool_calls": calls} if calls else {})}
                )
            else:
                messages += [{"role": "tool", "tool_call_id": i, "content": content(text)} for i, text in said.results]
                messages += [{"role": "user", "content": content(said.text)}] if said.text else []
        body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": ask.max_tokens}
        if ask.tools:
            body["tools"] = [{"type": "function", "function": {"name": t, "parameters": schema(t)}} for t in ask.tools]
        if ask.stream:
            state: ChatCompletionStreamState[Any] = ChatCompletionStreamState()
            async for chunk in await self.client.chat.completions.create(**body, **options, stream=True):
                state.handle_chunk(ChatCompletionChunk.model_validate(chunk.to_dict()))
            answer = state.current_completion_snapshot
        else:
            answer = await self.client.chat.completions.create(**body, **options)
        message = ChatCompletion.model_validate(answer.to_dict()).choices[0].message
        calls = [(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]  # type: ignore[union-attr]
        return Said("assistant", message.content or "", tuple(calls))


class MessagesAsker(Asker):
    def connect(self, gateway: ChatGateway) -> Any:
        return message_client(gateway, "none")

    async def send(self, ask: Ask, **options: Any) -> Said:
        from anthropic.types import Message

        def content(text: str) -> Any:
            return texts(text) if ask.blocks else text

        messages: list[Any] = []
        for said in ask.said:
            blocks: list[Any] = []
            if said.role == "assistant":
                blocks += [{"type": "text", "text": said.text}] if said.text else []
                blocks += [{"type": "tool_use", "id": i, "name": n, "input": json.loads(a)} for i, n, a in said.calls]
            else:
                blocks += [
                    {"type": "tool_result", "tool_use_id": i, "content": content(text)} for i, text in said.results
                ]
                blocks += texts(said.text) if said.text else []
            plain = not (said.calls or said.results or ask.blocks)
            messages.append({"role": said.role, "content": said.text if plain else blocks})
        body: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": ask.max_tokens}
        if ask.system:
            noise = {"type": "text", "text": f"x-anthropic-billing-header: {len(ask.said)}"}
            body["system"] = [noise, *texts(ask.system)] if ask.blocks else ask.system
        if ask.tools:
            body["tools"] = [{"name": tool, "input_schema": schema(tool)} for tool in ask.tools]
        if ask.stream:
            async with self.client.messages.stream(**body, **options) as events:
                answer = await events.get_final_message()
        else:
            answer = await self.client.messages.create(**body, **options)
        blocks = Message.model_validate(answer.to_dict()).content
        text = "".join(block.text for block in blocks if block.type == "text")
        calls = [(b.id, b.name, json.dumps(b.input)) for b in blocks if b.type == "tool_use"]
        return Said("assistant", text, tuple(calls))


@cache
def response_events() -> TypeAdapter[Any]:
    from openai.types.responses import ResponseStreamEvent
    from pydantic import TypeAdapter

    return TypeAdapter(ResponseStreamEvent)


class ResponsesAsker(Asker):
    def connect(self, gateway: ChatGateway) -> Any:
        return chat_client(gateway, "none")

    async def send(self, ask: Ask, **options: Any) -> Said:
        from openai.types.responses import Response

        last = max((i for i, said in enumerate(ask.said) if said.role == "assistant"), default=-1)
        response = ask.said[last].response if ask.recall and last >= 0 else ""
        items: list[Any] = []
        for said in ask.said[last + 1 :] if response else ask.said:
            output = said.role == "assistant"
            content = texts(said.text, "output_text" if output else "input_text") if ask.blocks else said.text
            items += [{"type": "function_call_output", "call_id": i, "output": text} for i, text in said.results]
            items += [{"role": said.role, "content": content}] if said.text or not said.results + said.calls else []
            items += [{"type": "function_call", "call_id": i, "name": n, "arguments": a} for i, n, a in said.calls]
        body: dict[str, Any] = {"model": "m", "input": items, "max_output_tokens": ask.max_tokens}
        body |= {"previous_response_id": response} if response else {}
        body |= {"instructions": ask.system} if ask.system else {}
        if ask.tools:
            body["tools"] = [{"type": "function", "name": tool, "parameters": schema(tool)} for tool in ask.tools]
        if ask.stream:
            events = [event async for event in await self.client.responses.create(**body, **options, stream=True)]
            answer = [response_events().validate_python(event.to_dict()) for event in events][-1].response
        else:
            answer = await self.client.responses.create(**body, **options)
        parsed = Response.model_validate(answer.to_dict())
        calls = [(c.call_id, c.name, c.arguments) for c in parsed.output if c.type == "function_call"]
        return Said("assistant", parsed.output_text, tuple(calls), response=parsed.id)


def edited(said: Sequence[Said], index: int, text: str) -> tuple[Said, ...]:
    """Return a conversation with the text of one message replaced, which no response of the provider has."""
    changed = [replace(message, response="") for message in said]
    changed[index] = replace(changed[index], text=text)
    return tuple(changed)
