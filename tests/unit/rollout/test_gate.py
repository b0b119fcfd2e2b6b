"""Answers that are interrupted while the trainer learns, and go on with its new weights."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from rlkit_engine_torch.batch import DecodeBatch
from rlkit_engine_torch.fused import FusedDecoder

from rlkit.base.errors import RolloutError
from rlkit.engines import TorchEngine
from rlkit.models.weights import PolicyWeights
from rlkit.rollout.gate import Gate
from rlkit.testing import random_model
from rlkit.types import Completion, Request, SampleKey, Sampling, StopReason

PROMPTS = [(5, 9, 200, 31), (7, 7, 7, 12, 99, 104, 32, 8, 45, 61, 3), (5, 9, 200, 31), (40,), tuple(range(3, 23))]


def bound(kind: str, max_rows: int = 256) -> TorchEngine:
    engine, policy = TorchEngine(max_rows), random_model(kind)
    plain: dict[str, Any] = {"autocast": nullcontext, "unsharded": nullcontext, "stop_ids": frozenset(range(16))}
    device = next(policy.parameters()).device
    runtime = SimpleNamespace(policy=policy, device=device, context=512, tensor_parallel=1, **plain)
    engine.bind(runtime)  # type: ignore[arg-type]
    return engine


@pytest.fixture(params=["qwen2", "phi3"])
def engine(request: pytest.FixtureRequest) -> TorchEngine:
    """An engine whose decoder runs the prompts of interrupted answers once, and one that runs each of them whole."""
    return bound(request.param)


def requests(tokens: int) -> list[Request]:
    keys = [SampleKey(0, 1, "p", sample) for sample in range(len(PROMPTS))]
    return [Request(p, Sampling(max_tokens=tokens), k, f"s{k.sample}") for p, k in zip(PROMPTS, keys, strict=True)]


async def sample(
    engine: TorchEngine, gate: Gate, tokens: int, ends: list[int], policy: Any, *, last: int | None = None
) -> list[Completion]:
    """Return the answers, interrupted for a sync whenever one more has ended that `ends` counts.

    The last of them has so many `tokens`, or `last`.
    """
    done: list[int] = []

    async def one(place: int, request: Request) -> Completion:
        found = await gate.ask(request, engine.generate)
        done.append(place)
        if len(done) in ends:
            gate.close()
            engine.interrupt()
        gate.count(-1)
        return found

    gate.open()
    gate.count(len(PROMPTS))
    asked = requests(tokens)
    if last is not None:
        asked[-1] = replace(asked[-1], sampling=asked[-1].sampling.within(last))
    tasks = [asyncio.create_task(one(i, request)) for i, request in enumerate(asked)]
    for end in ends:
        while len(done) < end:
            await asyncio.sleep(0.001)
        await gate.quiet()
        await engine.sync(PolicyWeights(policy), engine.version + 1)
        gate.open()
    return await asyncio.gather(*tasks)


@pytest.mark.parametrize("ends", [[1], [1, 2, 4], [5]])
def test_an_answer_is_the_same_however_often_it_is_interrupted(engine: TorchEngine, ends: list[int]) -> None:
    """With the same weights: tokens depend on their places, and log-probs are those of the whole text before."""
    policy = engine._runtime.policy
    whole = asyncio.run(sample(engine, Gate(), 40, [], policy))
    assert len({len(answer.tokens) for answer in whole}) > 2
    found = asyncio.run(sample(engine, Gate(), 40, ends, policy))
    for one, other in zip(whole, found, strict=True):
        assert (one.tokens, one.stop) == (other.tokens, other.stop)
        assert other.logps == pytest.approx(one.logps, abs=1e-5)
        assert len(other.versions) == len(other.tokens)
        assert other.versions == sorted(other.versions)
    versions = {version for answer in found for version in answer.versions}  # of two syncs in a row, the first has none
    assert {0} <= versions <= set(range(len(ends) + 1))
    assert (len(versions) > 1) == (ends != [5])


def test_where_the_cut_falls_is_repeatable(engine: TorchEngine) -> None:
    """Decoding waits until all conversations wait for it, so that other weights always sample the same tokens."""
    policy = engine._runtime.policy
    found = []
    for _ in range(3):
        gate = Gate()
        engine.follow(gate.calm)
        engine.version = 0
        found.append(asyncio.run(sample(engine, gate, 40, [1, 3], policy)))
    assert [[a.versions for a in answers] for answers in found] == [[a.versions for a in found[0]]] * 3
    assert [[a.logps for a in answers] for answers in found] == [[a.logps for a in found[0]]] * 3
    assert any(len(set(answer.versions)) == 3 for answer in found[0])


def test_interrupted_completions_share_their_prompts_pass() -> None:
    """Two of the prompts are equal; which tokens an answer has of its own is known from its request."""
    engine, gate, admitted = bound("qwen2"), Gate(), []
    admit = FusedDecoder.admit

    def noted(decoder: FusedDecoder, prompts: Any, copies: Any, own: Any, *rest: Any) -> Any:
        admitted.append((list(prompts), list(copies), [len(tokens) for tokens in own]))
        return admit(decoder, prompts, copies, own, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedDecoder, "admit", noted)
        engine._stop_ids = frozenset()
        engine.follow(gate.calm)
        asyncio.run(sample(engine, gate, 40, [1], engine._runtime.policy, last=6))
    [(first, copies, none), (rest, others, own)] = admitted
    assert sorted(first) == sorted(set(PROMPTS))
    assert (sorted(copies), none) == ([1, 1, 1, 2], [0] * 5)
    assert sorted(rest) == sorted(set(PROMPTS[:4]))
    assert (sorted(others), own) == ([1, 1, 2], [6] * 4)


def test_requests_of_earlier_steps_come_first() -> None:
    """Where the order must not depend on time: step 9 before step 10."""
    engine, gate = bound("qwen2", max_rows=1), Gate()
    engine.follow(gate.calm)
    done: list[int] = []

    async def one(step: int) -> None:
        await engine.generate(
            Request(PROMPTS[0], Sampling(max_tokens=4), SampleKey(0, step, "0/a", 0), f"{step}/0/a/0")
        )
        done.append(step)

    async def run() -> None:
        await asyncio.gather(*(one(step) for step in (10, 11, 9)))

    asyncio.run(run())
    assert done == [9, 10, 11]


def test_a_model_without_a_decoder_is_interrupted_between_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlkit_engine_torch.engine._make_decoder", lambda runtime: None)
    engine = bound("qwen2")
    engine._stop_ids = frozenset()

    sample_token, tokens = DecodeBatch.sample, count(1)

    def sample_three(batch: DecodeBatch, *args: Any) -> None:
        sample_token(batch, *args)
        if next(tokens) == 3:
            engine.interrupt()

    monkeypatch.setattr(DecodeBatch, "sample", sample_three)
    answer = asyncio.run(engine.generate(requests(400)[0]))
    assert answer.stop is StopReason.INTERRUPTED
    assert len(answer.tokens) == len(answer.versions) == 3


def test_requests_wait_at_a_closed_gate() -> None:
    async def run() -> tuple[bool, Completion]:
        gate = Gate()
        answered = asyncio.Event()

        async def generate(request: Request) -> Completion:
            answered.set()
            return Completion([1], [-0.5], [3], StopReason.STOP)

        gate.count(1)
        task = asyncio.create_task(gate.ask(requests(4)[0], generate))
        await asyncio.sleep(0.01)
        early = answered.is_set()
        gate.open()
        return early, await task

    assert asyncio.run(run()) == (False, Completion([1], [-0.5], [3], StopReason.STOP))


def test_an_engine_that_cannot_be_interrupted_names_the_option() -> None:
    from rlkit_authors.engine import FakeEngine

    from rlkit.base.errors import EngineError

    with pytest.raises(EngineError, match="FakeEngine cannot interrupt requests; set rollout.max_staleness: 0"):
        FakeEngine().interrupt()


def test_a_refused_request_does_not_make_the_engine_idle() -> None:
    """Of two that are busy one waits for the engine; the other's request fails before anything else can run."""

    async def refuse(request: Request) -> Completion:
        raise RolloutError("too long")

    async def run() -> None:
        gate = Gate()
        gate.open()
        gate.count(2)
        calm = asyncio.create_task(gate.calm())
        await asyncio.sleep(0)
        gate.count(-1)
        with pytest.raises(RolloutError):
            await gate.ask(requests(4)[0], refuse)
        await asyncio.sleep(0.01)
        assert not calm.done()
        gate.count(-1)
        await calm

    asyncio.run(run())
