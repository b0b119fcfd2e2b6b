"""Tokens of vLLM against TorchEngine's and the exact distribution, on the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rlkit_engine_vllm import VllmLaunch, VllmServer

from rlkit.base.errors import EngineError
from rlkit.models.actor import Actor
from rlkit.testing import random_model
from tests.agreement import (
    large,
    test_200_greedy_answers_of_a_tiny_model_agree,
    test_200_greedy_answers_of_ten_million_parameters_agree,
    test_a_stop_text_ends_a_turn_as_with_torch_engine,
    test_sampled_frequencies_are_those_of_the_softmax,
)
from tests.served import PROMPTS, RETRY, Trainer, adapted_policy, request
from tests.vllm.conftest import TINY

__all__ = [
    "large",
    "test_200_greedy_answers_of_a_tiny_model_agree",
    "test_200_greedy_answers_of_ten_million_parameters_agree",
    "test_a_stop_text_ends_a_turn_as_with_torch_engine",
    "test_sampled_frequencies_are_those_of_the_softmax",
]


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


def test_a_seed_repeats_a_sample(trainer: Trainer, engine: VllmServer) -> None:
    asked = [request(PROMPTS[0], i, str(i), max_tokens=12) for i in range(8)]
    first, again = (trainer.ask(engine, order) for order in (asked, asked[::-1]))
    assert [answer.tokens for answer in first] == [answer.tokens for answer in again[::-1]]


@pytest.mark.parametrize("in_four_bits", [False, True])
def test_adapters_travel_alone_after_the_base(trainer: Trainer, engine: VllmServer, in_four_bits: bool) -> None:
    adapted = Trainer(adapted_policy(in_four_bits, **TINY))
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
