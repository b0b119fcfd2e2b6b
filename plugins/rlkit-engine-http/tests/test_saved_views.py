"""A server's weights have the names under which a trainer sends them, and are written in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlkit_engine_http.server import saved_views

from rlkit.models.weights import PolicyWeights
from rlkit.testing import random_model

EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"head_dim": 8, "n_routed_experts": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 16},
    "llama": {},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_what_is_sent_fits_into_the_views(kind: str) -> None:
    sender, receiver = (random_model(kind, seed=seed, **EXPERTS[kind]) for seed in (0, 1))
    views = saved_views(receiver)
    weights = PolicyWeights(sender)
    sent = {name: tensor for bucket in weights.buckets() for name, tensor in bucket}
    assert views.keys() == sent.keys() == weights.specs.keys()
    for name, tensor in sent.items():
        views[name].copy_(tensor)
    for own, other in zip(sender.parameters(), receiver.parameters(), strict=True):
        assert torch.equal(own, other)
