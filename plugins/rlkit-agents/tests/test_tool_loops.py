"""The official SDKs' own tool loops, streamed or not: each is one linear sample, whose tokens are the policy's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel
from rlkit_agents.server import ChatGateway
from rlkit_agents.session import AgentSession
from test_forest import check_samples

from tests.agent_clients import chat_client, message_client, run
from tests.fake_policy import END, tree

if TYPE_CHECKING:  # each client takes seconds to import
    import anthropic
    import openai

TURNS = (
    'Both. <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>'
    '<tool_call>{"name": "add", "arguments": {"a": 30, "b": 4}}</tool_call>',
    '<tool_call>{"name": "add", "arguments": {"a": 3, "b": 34}}</tool_call>',
    "37",
)


class add(BaseModel):  # the SDK names the tool after its class
    """Add numbers."""

    a: int
    b: int


async def tool_runner(client: anthropic.AsyncAnthropic, stream: bool) -> str:
    """A thread: after the first turn only new messages are sent, without the system prompt and the tools."""
    import anthropic

    @anthropic.beta_async_tool(name="add")
    async def add_numbers(a: int, b: int) -> str:
        """Add numbers."""
        return str(a + b)

    runner: Any = client.beta.messages.tool_runner(
        model="m",
        max_tokens=500,
        system="Add.",
        tools=[add_numbers],
        messages=[{"role": "user", "content": "go"}],
        stream=stream,  # type: ignore[arg-type]
    )
    if stream:
        async for events in runner:
            async for _ in events:
                pass
    return str((await runner.until_done()).content[0].text)


async def chat_completions(client: openai.AsyncOpenAI, stream: bool) -> str:
    import openai

    tools: Any = [openai.pydantic_function_tool(add)]
    messages: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        if stream:
            async with client.chat.completions.stream(model="m", messages=messages, tools=tools) as events:
                async for _ in events:
                    pass
                completion = await events.get_final_completion()
        else:
            completion = await client.chat.completions.parse(model="m", messages=messages, tools=tools)
        message = completion.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return str(message.content)
        for call in message.tool_calls:
            numbers: Any = call.function.parsed_arguments
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(numbers.a + numbers.b)})


async def responses(client: openai.AsyncOpenAI, stream: bool) -> str:
    import openai

    tools: Any = [openai.pydantic_function_tool(add)["function"] | {"type": "function"}]
    items: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        if stream:
            async with client.responses.stream(model="m", input=items, tools=tools) as events:
                async for _ in events:
                    pass
                response: Any = await events.get_final_response()
        else:
            response = await client.responses.create(model="m", input=items, tools=tools)
        items += response.output
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return str(response.output_text)
        for call in calls:
            numbers = add.model_validate_json(call.arguments)
            items.append(
                {"type": "function_call_output", "call_id": call.call_id, "output": str(numbers.a + numbers.b)}
            )


async def openai_agents(client: openai.AsyncOpenAI, stream: bool, model: str) -> str:
    import agents

    async def add_numbers(a: int, b: int) -> str:
        """Add numbers."""
        return str(a + b)

    tool = agents.function_tool(add_numbers, name_override="add")
    agent = agents.Agent("adder", tools=[tool], model=getattr(agents, model)("m", client))
    options = agents.RunConfig(tracing_disabled=True)
    if not stream:
        return str((await agents.Runner.run(agent, "go", run_config=options)).final_output)
    result = agents.Runner.run_streamed(agent, "go", run_config=options)
    async for _ in result.stream_events():
        pass
    return str(result.final_output)


async def agents_by_chat(client: openai.AsyncOpenAI, stream: bool) -> str:
    return await openai_agents(client, stream, "OpenAIChatCompletionsModel")


async def agents_by_responses(client: openai.AsyncOpenAI, stream: bool) -> str:
    return await openai_agents(client, stream, "OpenAIResponsesModel")


LOOPS: list[tuple[Callable[..., Any], Callable[[Any, bool], Awaitable[str]]]] = [
    (message_client, tool_runner),
    (chat_client, chat_completions),
    (chat_client, responses),
    (chat_client, agents_by_chat),
    (chat_client, agents_by_responses),
]


@pytest.mark.parametrize("stream", [False, True], ids=["answers", "streams"])
@pytest.mark.parametrize(("connect", "loop"), LOOPS, ids=[loop.__name__ for _, loop in LOOPS])
def test_a_tool_loop_of_an_sdk_is_one_sample(
    connect: Callable[..., Any], loop: Callable[[Any, bool], Awaitable[str]], stream: bool
) -> None:
    async def test(gateway: ChatGateway, session: AgentSession) -> None:
        async with connect(gateway, session.id) as client:
            assert await loop(client, stream) == "37"
        assert tree(session.forest) == [None, 0, 1]
        [sample] = check_samples(session)
        sampled = "".join(chr(token) for token, chosen in zip(sample.tokens, sample.mask, strict=True) if chosen)
        assert sampled == "".join(f"{turn}{END}" for turn in TURNS)
        assert sample.fork is None
        results = [message["content"] for message in sample.messages if message["role"] == "tool"]
        assert results == ["3", "34", "37"]
        assert session.counts["tokens_retokenized"] == session.forest.forks == 0

    run(test, *TURNS)
