"""What conversations cost besides the engine: `python -m tests.bench.conversations [loop] [barrier]`.

`loop`: the CPU time of 1,024 conversations of one turn with an engine that answers at once, scored by `MathReward`.

`barrier`: what a barrier between turns costs. 512 conversations through TorchEngine, at most 64 rows at once, on one
thread: three turns of 24 tokens, and after each but the last a tool that takes 0.1 to 1 s. Without the barrier each
goes its own way; with it, no turn begins before all tools have answered. Printed is the share of the time in which
nobody waits for the engine, and the time itself.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from contextlib import nullcontext
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from rlkit_authors.models import build_tokenizer

from rlkit.base.garbage import lasting
from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.parser import ParsedTurn, ToolCall
from rlkit.interfaces.tool import State, Tool
from rlkit.parsers import HermesParser
from rlkit.rollout.collect import BusyTimer, ConversationSetup, collect
from rlkit.rollout.conversation import Limits
from rlkit.rollout.participants import Participants
from rlkit.rollout.template import ChatTemplate
from rlkit.testing import random_model
from rlkit.types import Completion, Prompt, Request, Sampling, StopReason, Trajectory
from tests.bench.step_costs import conversations, instant_engine, tiny

LOOP, ROUNDS, GOAL = 1024, 9, 100
"""Conversations of `loop`, how often they are held, and the milliseconds that they may take."""
CONVERSATIONS, TURNS, TOKENS, ROWS = 512, 3, 24, 64


class Slow(Tool):
    """Takes its time, and with a barrier everybody's."""

    name, description = "slow", "Takes its time."
    parameters = {"type": "object", "properties": {}}  # noqa: RUF012

    def __init__(self, barrier: asyncio.Barrier | None) -> None:
        self.barrier = barrier
        self.rng = random.Random(0)
        self.timeout = 600.0

    async def call(self, arguments: dict[str, Any], state: State, **kwargs: Any) -> str:
        await asyncio.sleep(self.rng.uniform(0.1, 1.0))
        if self.barrier is not None:
            await self.barrier.wait()
        return "done"


class Always(HermesParser):
    """Finds a call in whatever a model with random weights says."""

    def parse(self, text: str) -> ParsedTurn:
        return ParsedTurn(text, [ToolCall("slow")])


class Stopping(RolloutEngine):
    """Lets each turn of TorchEngine end as if the policy had ended it."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine

    def bind(self, runtime: Any) -> None:
        self.engine.bind(runtime)

    async def generate(self, request: Request) -> Completion:
        answer = await self.engine.generate(request)
        return Completion(answer.tokens, answer.logps, answer.versions, StopReason.STOP)

    async def sync(self, stream: Any, version: int) -> None:
        await self.engine.sync(stream, version)


def play(engine: RolloutEngine, tokenizer: Any, together: bool) -> tuple[float, float]:
    """Hold all conversations; give the engine's idle share and the seconds that they took."""

    async def all_of_them() -> tuple[float, float]:
        participants = Participants({"slow": Slow(asyncio.Barrier(CONVERSATIONS) if together else None)}, Always())
        gauge, start = BusyTimer(), time.perf_counter()
        setup = ConversationSetup(
            engine, ChatTemplate(tokenizer, {tokenizer.eos_token_id}), Sampling(max_tokens=TOKENS), 8, 0, 1,
            participants=participants, limits=Limits(turns=TURNS), timer=gauge,
        )  # fmt: skip
        prompts = [(i, Prompt(str(i), [{"role": "user", "content": f"{i}?"}])) for i in range(CONVERSATIONS // 8)]

        async def finish(group: list[Trajectory]) -> None: ...

        await collect(setup, prompts, finish)
        seconds = time.perf_counter() - start
        return 1 - gauge.busy / seconds, seconds

    return asyncio.run(all_of_them())


def loop() -> None:
    """Print the CPU time of conversations without the engine's own."""
    _, tokenizer = tiny()
    engine = instant_engine(tokenizer, 8)
    with lasting():  # as in a run
        spent = [1000 * LOOP * conversations(engine, tokenizer, "1+1=", LOOP)[0] for _ in range(ROUNDS)]
    print(f"{LOOP:,} conversations: {min(spent):.0f} to {max(spent):.0f} ms of CPU, median {median(spent):.0f}", end="")
    print(f" (goal {GOAL})")


def barrier() -> None:
    """Print the engine's idle share with a barrier between turns and without."""
    model = random_model("qwen2", hidden_size=128, intermediate_size=256, num_hidden_layers=3, initializer_range=0.02)
    tokenizer = build_tokenizer()
    for together in (False, True):
        engine = Stopping(TorchEngine(max_rows=ROWS))
        engine.bind(
            SimpleNamespace(
                policy=model, device=torch.device("cpu"), context=512, stop_ids=frozenset(), autocast=nullcontext,
                unsharded=nullcontext, tensor_parallel=1,
            )
        )  # fmt: skip
        idle, seconds = play(engine, tokenizer, together)
        print(f"{'a barrier between turns' if together else 'each its own way'}: idle {idle:.0%}, {seconds:.1f} s")


def main() -> None:
    rows = {"loop": loop, "barrier": barrier}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", default=list(rows), metavar="ROW", help=", ".join(rows))
    torch.set_num_threads(1)
    for row in parser.parse_args().rows:
        rows[row]()


if __name__ == "__main__":
    main()
