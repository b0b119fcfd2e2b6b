"""The agent of the recipe quick_agent: a loop with a calculator, around OpenAI's own client."""

from __future__ import annotations

import json
from typing import Any

from rlkit.interfaces.agent import AgentClient, AgentTask
from rlkit.tools import Calculator, evaluate

TURNS = 3
CALCULATOR = Calculator()
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": CALCULATOR.name,
        "description": CALCULATOR.description,
        "parameters": CALCULATOR.parameters,
    },
}


async def run(client: AgentClient, task: AgentTask) -> str:
    """Return the answer of an agent that may call a calculator."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    plain_http = DefaultAsyncHttpxClient(verify=False)  # reading certificates takes longer than a turn
    async with AsyncOpenAI(base_url=f"{client.url}/v1", api_key=client.key, http_client=plain_http) as openai:
        messages: list[Any] = list(task.prompt.messages)
        for _ in range(TURNS):
            answer = await openai.chat.completions.create(model=client.model, messages=messages, tools=[TOOL])
            reply = answer.choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            for call in reply.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": _calculated(call.function)})
            if not reply.tool_calls:
                return reply.content or ""
    return ""


def _calculated(function: Any) -> str:
    """Return the result of a call of the calculator, or why there is none."""
    if function.name != CALCULATOR.name:
        return f"error: there is no tool {function.name!r}"
    try:
        return f"{evaluate(str(json.loads(function.arguments)['expression'])):g}"
    except (ValueError, KeyError, ArithmeticError, SyntaxError) as error:
        return f"error: {error}"
