"""TorchEngine between the turns of conversations: what was run once is not run again, and nothing else changes."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch

from rlkit.engines import TorchEngine
from rlkit.types import Completion, Request, SampleKey, Sampling
from tests.contract.test_torch_engine import ARCHITECTURES, engine_of, model

PROMPT, SAMPLED, REPLY = 7, 5, 3


def turn(tokens: tuple[int, ...], name: str, temperature: float = 0.0, max_tokens: int = SAMPLED) -> Request:
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature)
    return Request(tokens, sampling, SampleKey(0, 1, name, 0), session=name, continues=True)


def engine(policy: Any, keeps: bool = True) -> TorchEngine:
    """Return an engine whose turns never end by themselves; without keys and values of earlier turns for comparison."""
    made = engine_of(policy, context=1024)
    made._stop_ids = frozenset()
    if not keeps:
        made._sampler.prefixes.max_bytes = 0  # type: ignore[attr-defined]
    return made


def converse(asked: TorchEngine, turns: int, count: int = 1, temperature: float = 0.0) -> list[list[Completion]]:
    """Hold conversations of one prompt; from the second turn on they differ in what they read."""

    async def one(number: int) -> list[Completion]:
        rng = random.Random(number)
        tokens, answers = tuple(range(5, 5 + PROMPT)), []
        for _ in range(turns):
            answers.append(await asked.generate(turn(tokens, str(number), temperature)))
            tokens += (*answers[-1].tokens, *(rng.randrange(3, 200) for _ in range(REPLY)))
        return answers

    async def all_of_them() -> list[list[Completion]]:
        return list(await asyncio.gather(*map(one, range(count))))

    return asyncio.run(all_of_them())


def check_equal(kept: list[list[Completion]], plain: list[list[Completion]]) -> None:
    for ours, theirs in zip(kept, plain, strict=True):
        assert [a.tokens for a in ours] == [a.tokens for a in theirs]
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(a.logps), torch.tensor(b.logps), rtol=0, atol=1e-5)


@pytest.mark.parametrize("turns", [1, 2, 4, 8, 16, 32])
def test_each_token_of_a_conversation_is_prefilled_once(turns: int) -> None:
    """A prompt of 7; later turns run the last sampled token, which was not read yet, and a reply of 3."""
    asked = engine(model("qwen2"))
    converse(asked, turns)
    assert asked.health()["prefilled_tokens"] == PROMPT + (turns - 1) * (1 + REPLY)
    assert asked.health()["prefilled_tokens"] == 0  # counted since the last call


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kept_keys_and_values_change_no_token(kind: str, temperature: float) -> None:
    """Sliding windows of 5 and 6 tokens among them, and rows of a group that join while others are decoded."""
    asked = engine(model(kind))
    kept = converse(asked, 4, 3, temperature)
    check_equal(kept, converse(engine(model(kind), keeps=False), 4, 3, temperature))
    assert asked.health()["prefilled_tokens"] == PROMPT + 3 * 3 * (1 + REPLY)
