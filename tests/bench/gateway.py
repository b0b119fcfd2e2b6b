"""What the gateway costs: `python tests/bench/gateway.py`.

64 conversations at once of three turns, 64 tokens each. On one side rlkit's loop drives them with a simulated user; on
the other an agent does, which posts chat completions to the gateway with aiohttp and sends its history each time. The
sides alternate, with an engine that answers at once, so that the sampling's noise does not hide the difference, which
includes the client. Printed is its median in process CPU seconds, as a share of the same conversations by TorchEngine
on one thread.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import aiohttp
import torch
from rlkit_authors.models import build_tokenizer

from rlkit.engines import TorchEngine
from rlkit.interfaces.agent import Agent, AgentClient, AgentResult, AgentTask
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.interaction import Interaction, Reply
from rlkit.interfaces.tool import State
from rlkit.recipe import ConversationLimits
from rlkit.rollout.agents import AgentHost
from rlkit.rollout.collect import ConversationSetup, collect
from rlkit.rollout.conversation import Limits
from rlkit.rollout.dialogue import Dialogue
from rlkit.rollout.participants import Participants
from rlkit.testing import random_model
from rlkit.types import Completion, Message, Prompt, Request, Sampling, StopReason, Trajectory
from tests.bench.conversations import Stopping

SESSIONS, TURNS, TOKENS, GROUP = 64, 3, 64, 8


class Instant(RolloutEngine):
    """Samples random tokens in no time."""

    def bind(self, runtime: Any) -> None: ...

    async def generate(self, request: Request) -> Completion:
        await asyncio.sleep(0)
        tokens = random.Random(str(request.key)).choices(range(5, 250), k=TOKENS)
        return Completion(tokens, [-1.0] * TOKENS, [0] * TOKENS, StopReason.STOP)

    async def sync(self, stream: Any, version: int) -> None: ...


class GoesOn(Interaction):
    """Says "go on" after each turn."""

    async def start(self, prompt: Prompt, state: State) -> None: ...

    async def reply(self, messages: Sequence[Message], state: State) -> Reply:
        return Reply([{"role": "user", "content": "go on"}], False)


class ChatAgent(Agent):
    """Says "go on" after each turn, over HTTP."""

    http: aiohttp.ClientSession

    async def run(self, task: AgentTask, client: AgentClient) -> AgentResult:
        messages = list(task.prompt.messages)
        for _ in range(TURNS):
            headers, body = {"Authorization": f"Bearer {client.key}"}, {"model": client.model, "messages": messages}
            async with self.http.post(f"{client.url}/v1/chat/completions", json=body, headers=headers) as answer:
                messages.append((await answer.json())["choices"][0]["message"])
            messages.append({"role": "user", "content": "go on"})
        return AgentResult()


async def play(
    engine: RolloutEngine, tokenizer: Any, gateway: bool, step: int, *, sessions: int = SESSIONS
) -> tuple[float, int]:
    """Hold all conversations; return their CPU seconds and their sampled tokens."""
    recipe: Any = SimpleNamespace(model=SimpleNamespace(chat_template_kwargs={}))
    dialogue = Dialogue(recipe, tokenizer, 512, frozenset({tokenizer.eos_token_id}))
    agent = ChatAgent()
    host = AgentHost(agent, dialogue, ConversationLimits())
    setup = ConversationSetup(
        engine, dialogue.template, Sampling(max_tokens=TOKENS), GROUP, 0, step,
        participants=Participants(interaction=GoesOn()), limits=Limits(turns=TURNS, context=512),
        agent=host.converse if gateway else None,
    )  # fmt: skip
    prompts = [(i, Prompt(str(i), [{"role": "user", "content": f"{i}?"}])) for i in range(sessions // GROUP)]

    async def finish(group: list[Trajectory]) -> None: ...

    async with aiohttp.ClientSession() as agent.http:
        start = time.process_time()
        trajectories = await collect(setup, prompts, finish)
        seconds = time.process_time() - start
    await host.close()
    assert [t.error for t in trajectories] == [None] * sessions
    assert {(len(t.span.branches), len(t.turn_rewards)) for t in trajectories} == {(0, TURNS)}
    return seconds, sum(t.response_length for t in trajectories)


async def alternate(engine: RolloutEngine, rounds: int) -> None:
    tokenizer, differences = build_tokenizer(), []
    for step in range(rounds + 1):
        own, gateway = [(await play(Instant(), tokenizer, side, step))[0] for side in (False, True)]
        if step:  # the first round warms up
            differences.append(gateway - own)
    overhead = statistics.median(differences)
    print(f"gateway {overhead:.3f} s, {1000 * overhead / SESSIONS / TURNS:.2f} ms a request", flush=True)
    seconds, tokens = await play(engine, tokenizer, False, 0)
    print(f"sampling {tokens} tokens {seconds:.2f} s: the gateway adds {overhead / seconds:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = random_model("qwen2", hidden_size=256, intermediate_size=1024, num_hidden_layers=6, initializer_range=0.02)
    print(f"{sum(weight.numel() for weight in model.parameters()) / 1e6:.1f}M parameters")
    engine = Stopping(TorchEngine())
    engine.bind(
        SimpleNamespace(
            policy=model, device=torch.device("cpu"), context=512, stop_ids=frozenset(), autocast=nullcontext,
            unsharded=nullcontext, tensor_parallel=1,
        )
    )  # fmt: skip
    asyncio.run(alternate(engine, rounds))


if __name__ == "__main__":
    main()
