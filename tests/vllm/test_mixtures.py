"""A mixture of experts on real vLLM: its weights are the trainer's after each sync."""

from __future__ import annotations

import pytest
import torch
from rlkit_engine_vllm import VllmServer

from rlkit.testing import random_model
from tests.served import RETRY, Trainer

SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 2,
    "num_experts_per_tok": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "initializer_range": 0.1,
}  # fmt: skip
"""Heads of 32 and experts in multiples of 32, as vLLM's kernels for CPUs need them."""


@pytest.mark.parametrize(
    ("kind", "experts"),
    [("qwen3_moe", {"num_experts": 8}), ("glm4_moe", {"n_routed_experts": 8, "first_k_dense_replace": 1})],
)
def test_the_experts_are_the_trainers_after_every_sync(kind: str, experts: dict[str, int]) -> None:
    trainer = Trainer(random_model(kind, **SIZES, **experts))
    for name, bias in trainer.policy.named_buffers():
        if name.endswith("e_score_correction_bias"):
            bias.copy_(torch.rand(bias.shape, generator=torch.Generator().manual_seed(1)) + 5)
    engine = VllmServer(retry=RETRY)
    generator = torch.Generator().manual_seed(0)
    try:
        engine.bind(trainer.runtime)
        for _ in range(3):
            with torch.no_grad():
                for weight in trainer.policy.parameters():
                    weight.add_(0.05 * torch.randn(weight.shape, generator=generator))
            trainer.publish(engine)
            assert engine.health()["weight_gap"] < 1e-5
            assert trainer.is_served_by(engine)
    finally:
        engine.close()
        trainer.runner.close()
