"""The agent of the recipe quick_agent: OpenAI's Agents SDK, unmodified, with a calculator."""

from __future__ import annotations

from rlkit_math.calculator import Calculator, evaluate

from rlkit.base.errors import RecipeError
from rlkit.base.installed import extra_command
from rlkit.interfaces.agent import AgentClient, AgentTask

try:
    from agents import Agent, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient
except ImportError as error:
    raise RecipeError(f"rlkit_agents.example needs openai-agents ({error}): {extra_command('agents')}") from error

TURNS = 3


async def calculate(expression: str) -> str:
    """Return the value of an expression, or why there is none."""
    try:
        return f"{evaluate(expression):g}"
    except (ValueError, ArithmeticError, SyntaxError) as error:
        return f"error: {error}"


async def run(client: AgentClient, task: AgentTask) -> str:
    """Return the answer of an agent that may call a calculator."""
    plain_http = DefaultAsyncHttpxClient(verify=False)  # reading certificates takes longer than a turn
    async with AsyncOpenAI(base_url=f"{client.url}/v1", api_key=client.key, http_client=plain_http) as openai:
        tool = function_tool(calculate, name_override=Calculator.name, description_override=Calculator.description)
        agent = Agent("calculator", tools=[tool], model=OpenAIChatCompletionsModel(client.model, openai))
        options = RunConfig(tracing_disabled=True)
        return str((await Runner.run(agent, task.text, max_turns=TURNS, run_config=options)).final_output)
