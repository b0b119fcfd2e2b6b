"""A harness of verifiers that needs no program of its own: OpenAI's client and the environment's tools."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from typing import Any

from openai import APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient
from verifiers.v1.clients import ModelContext
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness
from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.task import TaskData
from verifiers.v1.trace import Trace

__all__ = ["ChatHarness"]


class ChatHarness(Harness[HarnessConfig]):
    """Asks for the next turn until one calls no tool.

    A request that exceeds a limit of the run ends it, and what was said is scored.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # noqa: PLR0917 (the signature of verifiers)
        self,
        ctx: ModelContext,
        trace: Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: TaskData,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages: list[dict[str, Any]] = [] if system is None else [{"role": "system", "content": system}]
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        servers = {name: {"url": url, "timeout": self.config.tool_timeout} for name, url in mcp_urls.items()}
        async with AsyncExitStack() as stack:
            http = DefaultAsyncHttpxClient(verify=False)  # an address of this machine needs no certificates
            client = AsyncOpenAI(base_url=endpoint, api_key=secret, timeout=None, http_client=http)
            await stack.enter_async_context(client)
            schemas, dispatch, connections = await connect_mcp({"mcpServers": servers}, stack)
            options = {"model": ctx.model, **({"tools": schemas} if schemas else {})}
            while True:
                try:
                    completion = await client.chat.completions.create(messages=messages, **options)
                except APIStatusError as error:
                    if error.status_code == 400 and trace.num_turns:
                        break
                    raise
                reply = completion.choices[0].message
                messages.append(reply.model_dump(exclude_none=True))
                for call in reply.tool_calls or []:
                    result = await _called(call.function, dispatch, connections)
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
                if not reply.tool_calls:
                    break
        return ProgramResult(exit_code=0, stdout="", stderr="")


async def _called(function: Any, dispatch: dict[str, tuple[str, str]], connections: dict[str, Any]) -> Any:
    """Return the result of a call, or why there is none."""
    if function.name not in dispatch:
        return f"error: there is no tool {function.name!r}"
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError as error:
        return f"error: the arguments are no JSON: {error}"
    if not isinstance(arguments, dict):
        return "error: the arguments are no JSON object"
    return await call_mcp(connections, dispatch, function.name, arguments)
