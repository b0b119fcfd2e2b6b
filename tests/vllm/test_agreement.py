"""Tokens of vLLM against TorchEngine's and the exact distribution, on the same weights."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from rlkit_engine_vllm import VllmLaunch, VllmServer

from rlkit.base.errors import EngineError
from rlkit.engines import TorchEngine
from rlkit.interfaces.engine import RolloutEngine
from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import Lora
from rlkit.testing import random_model
from rlkit.types import Completion
from tests.served import PROMPTS, RETRY, Trainer, request
from tests.vllm.conftest import TINY

TEN_MILLION = {
    "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 5, "num_attention_heads": 6,
    "num_key_value_heads": 2, "initializer_range": 0.05, "vocab_size": 2048,
}  # fmt: skip
SAMPLES = 1000


@pytest.fixture(scope="module")
def large() -> Iterator[tuple[Trainer, VllmServer]]:
    """A trainer of ten million parameters, and a server with its weights."""
    trainer = Trainer(random_model("qwen2", **TEN_MILLION))
    engine = VllmServer(retry=RETRY, transport="disk")
    try:
        engine.bind(trainer.runtime)
        trainer.publish(engine, 1 << 24)
        yield trainer, engine
    finally:
        engine.close()
        trainer.runner.close()


def with_torch_engine(trainer: Trainer, prompts: list[tuple[int, ...]]) -> list[Completion]:
    """Return TorchEngine's greedy completions."""
    engine = TorchEngine()
    engine.bind(trainer.runtime)

    async def answers() -> list[Completion]:
        await engine.sync(PolicyWeights(trainer.policy), 1)
        asked = [request(prompt, temperature=0.0) for prompt in prompts]
        return list(await asyncio.gather(*(engine.generate(one) for one in asked)))

    try:
        return trainer.wait(answers())
    finally:
        engine.close()


def check_greedy(trainer: Trainer, engine: RolloutEngine) -> None:
    """Check that 200 greedy completions of both engines have the same tokens, and the same log-probs to 1e-4."""
    source = random.Random(7)
    prompts = [tuple(source.choices(range(256), k=source.randint(1, 40))) for _ in range(200)]
    expected = with_torch_engine(trainer, prompts)
    answers = trainer.ask(engine, [request(prompt, temperature=0.0, session=str(prompt)) for prompt in prompts])
    assert [answer.tokens for answer in answers] == [completion.tokens for completion in expected]
    assert [answer.stop for answer in answers] == [completion.stop for completion in expected]
    for answer, completion in zip(answers, expected, strict=True):
        assert answer.logps == pytest.approx(completion.logps, abs=1e-4)


def test_200_greedy_answers_of_a_tiny_model_agree(trainer: Trainer, engine: VllmServer) -> None:
    trainer.publish(engine)
    check_greedy(trainer, engine)


def test_200_greedy_answers_of_ten_million_parameters_agree(large: tuple[Trainer, VllmServer]) -> None:
    trainer, engine = large
    assert 9e6 < sum(parameter.numel() for parameter in trainer.policy.parameters()) < 11e6
    check_greedy(trainer, engine)


def test_log_probs_equal_the_trainers_after_every_sync(trainer: Trainer, engine: VllmServer) -> None:
    for seed in range(60, 65):
        trainer.learn(seed)
        trainer.publish(engine)
        assert engine.health()["weight_gap"] < 1e-5
        for asked in [request(prompt, i, temperature=0.8, top_p=0.9) for i, prompt in enumerate(PROMPTS)]:
            [answer] = trainer.ask(engine, [asked])
            tokens = torch.tensor([[*asked.tokens, *answer.tokens]])
            mask = torch.arange(tokens.shape[1])[None] >= len(asked.tokens)
            assert answer.logps == pytest.approx(
                Actor(trainer.policy)(tokens, mask, 0.8).logps[mask].tolist(), abs=1e-5
            )


@pytest.mark.parametrize("limits", [{}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.6}])
def test_sampled_frequencies_are_those_of_the_softmax(
    trainer: Trainer, engine: VllmServer, limits: dict[str, float]
) -> None:
    """Pearson's statistic over all likely tokens is within five standard deviations of its mean."""
    logits = trainer.policy(torch.tensor([PROMPTS[1]])).logits[0, -1].detach()
    probs = (logits / 0.7).softmax(-1)
    order = probs.argsort(descending=True)
    kept = torch.ones_like(probs, dtype=torch.bool)
    if "top_k" in limits:
        kept[order[5:]] = False
    if "min_p" in limits:
        kept = probs >= 0.2 * probs.max()
    if "top_p" in limits:
        kept[order[1:]] = probs[order].cumsum(0)[:-1] < 0.6
    expected = SAMPLES * torch.where(kept, probs, 0) / probs[kept].sum()
    asked = [request(PROMPTS[1], i, str(i), max_tokens=1, temperature=0.7, **limits) for i in range(SAMPLES)]
    counts = Counter(answer.tokens[0] for answer in trainer.ask(engine, asked))
    assert all(kept[token] for token in counts)
    likely = [token for token in range(len(probs)) if expected[token] >= 5]
    statistic = sum((counts[token] - expected[token].item()) ** 2 / expected[token].item() for token in likely)
    freedom = max(1, len(likely) - 1)
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_a_seed_repeats_a_sample(trainer: Trainer, engine: VllmServer) -> None:
    asked = [request(PROMPTS[0], i, str(i), max_tokens=12) for i in range(8)]
    first, again = (trainer.ask(engine, order) for order in (asked, asked[::-1]))
    assert [answer.tokens for answer in first] == [answer.tokens for answer in again[::-1]]


def test_adapters_travel_alone_after_the_base(trainer: Trainer, engine: VllmServer) -> None:
    adapted = Trainer(add_lora(random_model("qwen2", **TINY), Lora(rank=4, alpha=8)))
    alone = VllmServer([engine.fleet.owned[0].url], retry=RETRY, launch=VllmLaunch(adapter_only=True))
    alone.bind(adapted.runtime)
    generator = torch.Generator().manual_seed(5)
    try:
        for _ in range(3):
            with torch.no_grad():
                for name, weight in adapted.policy.named_parameters():
                    if "lora_" in name:
                        weight.copy_(0.2 * torch.randn(weight.shape, generator=generator))
            adapted.publish(alone)
            assert alone.health()["weight_gap"] < 1e-4
            assert adapted.is_served_by(alone)
    finally:
        alone.close()
        adapted.runner.close()
        trainer.publish(engine)


def test_heads_that_vllm_cannot_compute_are_refused(trainer: Trainer) -> None:
    small = Trainer(random_model("qwen2"))
    with pytest.raises(EngineError, match="has attention heads of 8, but vLLM computes 32, 64"):
        VllmServer(retry=RETRY).bind(small.runtime)
    small.runner.close()


def test_weights_are_removed_from_shared_memory(trainer: Trainer, engine: VllmServer) -> None:
    fresh = VllmServer([engine.fleet.owned[0].url], retry=RETRY)
    fresh.bind(trainer.runtime)
    trainer.publish(fresh)
    folder: Path = fresh.weights._push.transport.folder  # type: ignore[attr-defined]
    assert list(folder.glob("*.safetensors"))
    assert str(folder).startswith("/dev/shm/")
    fresh.close()
    assert not folder.exists()
    trainer.publish(engine)
