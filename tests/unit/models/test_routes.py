"""Routers select the experts that they are told, with weights of their own, in every kind of pass."""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from rlkit.distributed.fsdp2 import checkpoint_activations
from rlkit.models.actor import Actor
from rlkit.models.routes import Routing
from rlkit.models.vision import backbone_of
from rlkit.ops.logps import DEFAULT_READS
from rlkit.ops.routes import Routers
from rlkit.testing import random_model
from tests.flow.test_architectures import KINDS
from tests.unit.models.test_packing import rows_of

DEEPER = {"glm4_moe": {"num_hidden_layers": 3}, "deepseek_v3": {"num_hidden_layers": 3}}
"""Their first layer is dense."""
ONE_GROUP = {**KINDS["deepseek_v3"], "n_group": 1}
"""The scores of its single group are those of all experts, and its first topk has as many as a token has experts."""
EACH = [kind for kind in KINDS if kind.endswith(("moe", "moe_text"))] + [
    "mixtral", "qwen3_next", "granitemoehybrid", "gpt_oss", "deepseek_v3"
]  # fmt: skip
TOKENS, MASK = rows_of([20, 9], [[3, 15, 1], [2, 12]], 0)
"""Five rows, of which three share a prompt and two another."""


@cache
def actor(kind: str) -> Actor:
    return Actor(random_model(kind, **KINDS[kind], **DEEPER.get(kind, {})))


def recorded(module: Actor) -> Tensor:
    """Return the routes [B,T,R,K] of a plain pass over the rows, each of which has its own prompt."""
    assert module.routers is not None
    routing = Routing()
    with torch.no_grad():
        backbone_of(module.policy)(input_ids=TOKENS, use_cache=False, **routing.arrange(TOKENS[:, 0], TOKENS[:, 0]))
    return routing.recorded(module.routers).view(*TOKENS.shape, len(module.routers.layers), -1)


def flipped(routes: Tensor, experts: int) -> Tensor:
    """Return routes of which a tenth select the next experts; those of a shared prompt stay equal."""
    hit = torch.rand(*routes.shape[:3], 1, generator=torch.Generator().manual_seed(1)) < 0.1
    hit[1:3, :20] = hit[0, :20]
    hit[4, :9] = hit[3, :9]
    return torch.where(hit, routes % experts + 1, routes)


def gradients(module: Actor, routes: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Return log-probs and the gradients of a weighted sum of them."""
    module.zero_grad()
    out = module(TOKENS, MASK, 1.0, DEFAULT_READS._replace(expert_routes=routes))
    (out.logps * torch.linspace(-1, 1, TOKENS.numel()).view_as(TOKENS)).sum().backward()
    named = module.named_parameters()
    return out.logps.detach(), {name: p.grad.clone() for name, p in named if p.grad is not None}


def farthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).norm() / (other[name].norm() + 1e-6)) for name in other)


@pytest.mark.parametrize("kind", EACH)
def test_own_routes_change_nothing(kind: str) -> None:
    module = actor(kind)
    routes = recorded(module)
    module.passes.take_replayed()
    logps, plain = gradients(module)
    replayed_logps, replayed = gradients(module, routes)
    assert torch.equal(replayed_logps, logps)
    assert all(torch.equal(replayed[name], gradient) for name, gradient in plain.items())
    differing, compared = module.passes.take_replayed()
    assert differing == 0
    assert compared > 0
    assert module.passes.take_replayed() == (0, 0)


@pytest.mark.parametrize("kind", EACH)
def test_other_routes_are_followed_in_packed_and_plain_passes(kind: str) -> None:
    """An engine whose routes differ for a tenth of the tokens is followed exactly, and routers have a gradient."""
    module = actor(kind)
    assert module.routers is not None
    routes = flipped(recorded(module), module.routers.experts)
    live, _ = gradients(module)
    packed, packed_gradients = gradients(module, routes)
    module.passes.packed = False
    try:
        plain, plain_gradients = gradients(module, routes)
    finally:
        module.passes.packed = True
    assert (packed - live).abs().max() > 0.1
    assert (packed - plain).abs().max() < 2e-5
    assert farthest(packed_gradients, plain_gradients) < 1e-4
    gates = [name for name in packed_gradients if ".gate.weight" in name or ".router." in name]
    assert gates
    assert all(packed_gradients[name].abs().sum() > 0 for name in gates)
    differing, compared = module.passes.take_replayed()
    assert 0.05 < differing / compared < 0.5


@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3"])
def test_recomputed_layers_select_the_same_experts(kind: str) -> None:
    module = actor(kind)
    assert module.routers is not None
    routes = flipped(recorded(module), module.routers.experts)
    _, plain = gradients(module, routes)
    recomputing = Actor(random_model(kind, **KINDS[kind], **DEEPER.get(kind, {})))
    checkpoint_activations(recomputing)
    other = flipped(routes, module.routers.experts)
    out = recomputing(TOKENS, MASK, 1.0, DEFAULT_READS._replace(expert_routes=routes))
    between = DEFAULT_READS._replace(expert_routes=other)
    recomputing(TOKENS, MASK, 1.0, between)  # between the forward pass and its recomputation
    (out.logps * torch.linspace(-1, 1, TOKENS.numel()).view_as(TOKENS)).sum().backward()
    assert farthest({n: p.grad for n, p in recomputing.named_parameters() if p.grad is not None}, plain) < 1e-5


def test_gradients_are_those_of_a_hand_made_gate() -> None:
    """Softmax over live logits, gathered at fixed experts and renormalised; experts as products of matrices."""
    policy: Any = actor("qwen3_moe").policy
    layer = policy.model.layers[0]
    block = layer.mlp
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 32, generator=generator).requires_grad_()
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(60)])
    routing = Routing((ids + 1).to(torch.uint8)[None, :, None])
    block.gate.forward.begin(layer, (), routing.arrange(torch.zeros(60, dtype=torch.long), torch.arange(60)))
    block.zero_grad()
    y = block(x[None])[0]
    y.square().sum().backward()
    block.gate.forward.begin(layer, (), {})
    replayed: dict[str, Any] = {name: p.grad.clone() for name, p in block.named_parameters()}
    replayed["x"] = x.grad
    block.zero_grad()
    x.grad = None
    weights = (x @ block.gate.weight.T).softmax(-1).gather(1, ids)
    weights = weights / weights.sum(-1, keepdim=True)
    outputs = []
    for slot in range(2):
        up = torch.einsum("noh,nh->no", block.experts.gate_up_proj[ids[:, slot]], x)
        gate, value = up.chunk(2, -1)
        down = torch.einsum("nho,no->nh", block.experts.down_proj[ids[:, slot]], silu(gate) * value)
        outputs.append(weights[:, slot, None] * down)
    by_hand = outputs[0] + outputs[1]
    by_hand.square().sum().backward()
    assert (y - by_hand).abs().max() < 1e-5
    assert farthest(replayed, {name: p.grad for name, p in block.named_parameters()} | {"x": x.grad}) < 1e-6


def test_groups_of_experts_stay_live() -> None:
    module = Actor(random_model("deepseek_v3", **ONE_GROUP))
    routes = recorded(module)
    assert module.routers == Routers((1,), 2, 4, 2)
    assert torch.equal(gradients(module, routes)[0], gradients(module)[0])


def test_tokens_without_routes_are_routed_live() -> None:
    module = actor("qwen3_moe")
    module.passes.take_replayed()
    assert torch.equal(gradients(module, torch.zeros_like(recorded(module)))[0], gradients(module)[0])
    assert module.passes.take_replayed() == (0, 0)


def test_a_byte_holds_up_to_255_experts() -> None:
    assert [Routers((0,), 1, experts, 2).dtype for experts in (255, 256)] == [torch.uint8, torch.int16]


def test_a_copy_has_routers_of_its_own() -> None:
    module = actor("qwen3_moe")
    copied = deepcopy(module)
    routes = flipped(recorded(module), 4)
    expected, _ = gradients(module, routes)
    with torch.no_grad():
        for weight in module.parameters():
            weight.mul_(1.5)
    try:
        assert torch.equal(gradients(copied, routes)[0], expected)
        assert not torch.equal(gradients(module, routes)[0], expected)
    finally:
        actor.cache_clear()


def test_models_without_experts_have_no_routers() -> None:
    assert Actor(random_model("llama")).routers is None
