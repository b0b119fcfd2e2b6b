"""What an agent's session asks of the engine."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from rlkit_agents.server import ChatGateway
from rlkit_authors.models import build_tokenizer

from rlkit.base.errors import EngineError, RecipeError
from rlkit.interfaces.agent import AgentResult, AgentTask
from rlkit.interfaces.gateway import SessionLimits
from rlkit.interfaces.parser import ToolParser
from rlkit.interfaces.picture import Picture
from rlkit.parsers import GlmParser, HarmonyParser
from rlkit.rollout.agents import AgentHost, SessionClient, TemplateBackend
from rlkit.rollout.collect import BusyTimer
from rlkit.rollout.conversation import Limits
from rlkit.rollout.gate import Gate
from rlkit.rollout.template import ChatTemplate
from rlkit.types import Completion, JsonObject, Prompt, Request, SampleKey, Sampling, StopReason
from tests.agent_clients import chat_client
from tests.fake_policy import FakePolicy


class CalmEngine:
    """Answers a request once no conversation is busy, as an engine that must be repeatable does."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self.asked: list[Request] = []

    async def generate(self, request: Request) -> Completion:
        self.asked.append(request)
        await self.gate.calm()
        if len(request.tokens) == 2:  # the other sub-agent's is still in the engine when the first one is answered
            await asyncio.sleep(0.05)
            await self.gate.calm()
        return Completion([1], [-0.5], [0], StopReason.STOP)


def test_a_policy_of_texts_alone_refuses_pictures() -> None:
    dialogue: Any = SimpleNamespace(template=SimpleNamespace(reader=None))
    setup: Any = SimpleNamespace(limits=Limits(context=100))
    backend = TemplateBackend(setup, dialogue, None, SampleKey(0, 1, "0/p", 2))
    picture = {"role": "user", "content": [{"type": "image", "image": Picture(b"file")}]}
    with pytest.raises(RecipeError, match="the messages hold pictures, but the policy reads texts alone"):
        backend.render([picture], [], None)


def test_parallel_requests_of_an_agent_count_as_one_conversation() -> None:
    async def run() -> tuple[list[Request], int]:
        gate = Gate()
        gate.open()
        gate.count(1)
        engine = CalmEngine(gate)
        setup: Any = SimpleNamespace(
            engine=engine, gate=gate, timer=BusyTimer(), sampling=Sampling(max_tokens=5), limits=Limits(context=100),
            asks_routes=False,
            template=SimpleNamespace(reader=None),
        )  # fmt: skip
        dialogue: Any = SimpleNamespace()
        backend = TemplateBackend(setup, dialogue, None, SampleKey(0, 1, "0/p", 2))
        async with asyncio.timeout(5):
            await asyncio.gather(backend.sample([1], 3, "a/0"), backend.sample([1, 2], None, "b/0"))
        return engine.asked, gate.busy

    asked, busy = asyncio.run(run())
    assert busy == 1
    assert [request.sampling.max_tokens for request in asked] == [3, 5]
    assert [request.key.prompt for request in asked] == ["0/p/a/0", "0/p/b/0"]
    assert len({request.session for request in asked}) == 1


class Stubborn:
    """An agent that never ends, whatever its session answers."""

    def __init__(self, gateway: ChatGateway) -> None:
        self.gateway = gateway

    async def run(self, task: AgentTask, client: SessionClient) -> AgentResult:
        backend: Any = client.session.backend
        backend.fail = lambda: EngineError("the engine is dead")
        async with chat_client(self.gateway, client.session.id, max_retries=0) as asking:
            with suppress(openai.InternalServerError):
                await asking.chat.completions.create(model="m", messages=[{"role": "user", "content": "?"}])
        await asyncio.Event().wait()
        raise AssertionError


def test_an_engine_that_fails_ends_an_agent_that_goes_on() -> None:
    async def run() -> None:
        gateway = ChatGateway()
        await gateway.start()
        host: Any = SimpleNamespace(gateway=gateway, agent=Stubborn(gateway))
        task = AgentTask(Prompt("p", [], None), Path(), 0)
        try:
            async with asyncio.timeout(60):
                await AgentHost._run(host, task, FakePolicy(), SessionLimits(), seconds=600)  # type: ignore[arg-type]
        finally:
            await gateway.close()

    with pytest.raises(EngineError, match="the engine is dead"):
        asyncio.run(run())


TAKE: dict[str, Any] = {
    "type": "function",
    "function": {"name": "take", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
}
GLM_CALL = "<tool_call>take<arg_key>what</arg_key><arg_value>7</arg_value></tool_call>"


@pytest.mark.parametrize(
    ("parser", "prompt", "text", "read"),
    [
        (GlmParser(), "?", f"<think>Hm.</think>So.{GLM_CALL}", ("<think>Hm.</think>So.", [{"what": "7"}])),
        (GlmParser(), "?<think>\n", f"{GLM_CALL}</think>{GLM_CALL}", (f"{GLM_CALL}</think>", [{"what": "7"}])),
        (GlmParser(), "?<think>\n", GLM_CALL, (GLM_CALL, [])),
        (
            HarmonyParser(),
            "?",
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Four.",
            ("Four.", []),
        ),
    ],
)
def test_an_agent_reads_calls_as_a_tool_does(
    parser: ToolParser, prompt: str, text: str, read: tuple[str, list[JsonObject]]
) -> None:
    """The schema says that 7 is a text; what is thought is no call."""
    tokenizer = build_tokenizer()
    template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
    setup: Any = SimpleNamespace(limits=Limits(context=64))
    backend = TemplateBackend(setup, SimpleNamespace(template=template), parser, SampleKey(0, 1, "0/p", 2))  # type: ignore[arg-type]
    turn = backend.read(text, [TAKE], tokenizer.encode(prompt))
    assert (turn.text, [call.arguments for call in turn.calls]) == read
    assert backend.read(text, (), ()).calls == []
