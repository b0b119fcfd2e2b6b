"""Frozen weights in bfloat16 under adapters, optimizer and log-probs in float32."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from rlkit_engine_torch.decoder import Decoder
from torch import nn

from rlkit.base.errors import RecipeError
from rlkit.commands import parse
from rlkit.distributed.fsdp2 import make_fabric
from rlkit.models.actor import Actor, ValueModel
from rlkit.models.load import load_backbone, load_policy
from rlkit.models.reference import Reference
from rlkit.models.weights import PolicyWeights
from rlkit.recipe import Critic, Fabric, Lora, Model, Train
from rlkit.train.optim import make_optimizer

HALF, WHOLE = (Model("tiny", lora=Lora(rank=4, alpha=8), dtype=dtype) for dtype in ("bfloat16", "float32"))  # type: ignore[arg-type]
TOKENS = torch.arange(3, 43).reshape(2, 20)
MASK = torch.ones_like(TOKENS, dtype=torch.bool)


def dtypes(module: nn.Module, trained: bool) -> set[torch.dtype]:
    return {p.dtype for p in module.parameters() if p.requires_grad is trained}


def test_adapters_learn_in_float32_on_a_base_in_bfloat16() -> None:
    actor = Actor(load_policy(HALF))
    assert (dtypes(actor, True), dtypes(actor, False)) == ({torch.float32}, {torch.bfloat16})
    out, exact = actor(TOKENS, MASK), Actor(load_policy(WHOLE))(TOKENS, MASK)
    assert out.logps.dtype == torch.float32
    assert (out.logps - exact.logps).abs().mean() < 0.05  # as far as bfloat16 reaches: 8 bits
    (-out.logps.mean()).backward()
    grads = {name: p.grad for name, p in actor.named_parameters() if p.grad is not None}
    assert all("lora_" in name and grad.dtype == torch.float32 for name, grad in grads.items())
    assert any(grad.any() for grad in grads.values())
    optimizer = make_optimizer(actor, Train(steps=1, lr=1e-3))
    optimizer.step()
    moments = [x for state in optimizer.state.values() for x in (state["exp_avg"], state["exp_avg_sq"])]
    assert len(moments) == 2 * len(grads)
    assert all(x.dtype == torch.float32 for x in moments)


def test_gradients_are_about_those_of_a_base_in_float32() -> None:
    found = []
    for model in (HALF, WHOLE):
        actor = Actor(load_policy(model))
        (-actor(TOKENS, MASK).logps.mean()).backward()
        found.append(torch.cat([p.grad.flatten() for _, p in actor.named_parameters() if p.grad is not None]))
    assert torch.cosine_similarity(*found, dim=0) > 0.99


def test_a_critic_learns_its_adapters_and_its_head_alone() -> None:
    critic = ValueModel(*load_backbone(HALF))
    nn.init.ones_(critic.head.weight)
    values = critic(TOKENS, MASK)
    assert values.dtype == torch.float32
    values.sum().backward()
    trained = {name for name, p in critic.named_parameters() if p.grad is not None and p.grad.any()}
    assert "head.weight" in trained
    assert any("lora_B" in name for name in trained)
    assert all(name == "head.weight" or "lora_" in name for name, p in critic.named_parameters() if p.requires_grad)
    assert (dtypes(critic, True), dtypes(critic, False)) == ({torch.float32}, {torch.bfloat16})
    assert make_optimizer(critic, Critic(lora=Lora())).param_groups


def test_a_reference_is_frozen_and_a_policy_trained_whole_is_not() -> None:
    model = Model("tiny", dtype="bfloat16")
    actor = Actor(load_policy(model))
    assert dtypes(actor, True) == {torch.float32}
    reference = Reference(actor, model, lambda module: None)
    assert dtypes(reference.actor, False) == {torch.bfloat16}
    assert not dtypes(reference.actor, True)
    assert dtypes(load_policy(model, frozen=True), True) == {torch.bfloat16}  # validation trains nothing


def test_merged_weights_travel_in_the_type_of_the_base() -> None:
    policy = load_policy(HALF)
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            nn.init.constant_(parameter, 0.01)
    stream = PolicyWeights(policy)
    sent = dict(pair for bucket in stream.buckets() for pair in bucket)
    assert {name: (tuple(x.shape), x.dtype) for name, x in sent.items()} == stream.specs
    assert {x.dtype for x in sent.values()} == {torch.bfloat16}
    layer = policy.get_base_model().model.layers[0].self_attn.q_proj
    exact = layer.base_layer.weight.float() + layer.get_delta_weight("default")
    assert torch.equal(sent["model.layers.0.self_attn.q_proj.weight"], exact.bfloat16())
    adapters = stream.adapter()
    assert adapters is not None
    assert {x.dtype for _, x in adapters[1]} == {torch.float32}


def test_the_cache_decodes_a_base_in_bfloat16() -> None:
    """The logits of a step with the cache are those of a pass over all tokens, as far as bfloat16 reaches."""
    policy = load_policy(HALF).get_base_model()
    decoder = Decoder(policy)
    decoder.admit([TOKENS[0, :-1].tolist()], [1])
    step = decoder.step(TOKENS[0, -1:])
    with torch.no_grad():
        whole = policy(input_ids=TOKENS[:1]).logits[:, -1]
    assert (step.softmax(-1) - whole.softmax(-1)).abs().max() < 0.02


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_fabric_leaves_adapters_in_float32(precision: Literal["bf16-true", "bf16-mixed"]) -> None:
    fabric = make_fabric(Fabric("cpu", 1, precision=precision))
    actor = Actor(load_policy(WHOLE if precision == "bf16-true" else HALF))
    frequencies = [b.clone() for n, b in actor.named_buffers() if n.endswith("inv_freq")]
    module: Any = fabric.setup_module(actor)
    assert (dtypes(actor, True), dtypes(actor, False)) == ({torch.float32}, {torch.bfloat16})
    assert all(map(torch.equal, frequencies, (b for n, b in actor.named_buffers() if n.endswith("inv_freq"))))
    out = module(TOKENS, MASK)
    fabric.backward(-out.logps.mean())
    assert out.logps.dtype == torch.float32
    assert {p.grad.dtype for p in actor.parameters() if p.grad is not None} == {torch.float32}


LORA = "--model.lora.rank=4"


@pytest.mark.parametrize(
    ("recipe", "options", "message"),
    [
        ("quick_grpo", ["--fabric.precision=bf16-true"], "AdamW round to zero; set train.optimizer: AdamW8bit"),
        ("quick_ppo", ["--fabric.precision=bf16-true", LORA], "round to zero; set critic.optimizer: AdamW8bit"),
        ("quick_grpo", ["--fabric.precision=bf16-true", "--train.ema=0.99"], "train.ema is 0.99, but"),
        (
            "quick_grpo",
            ["--fabric.precision=bf16-true", "--kl_loss.coef=0.1", "--reference={refresh_every: 1, mix: 0.5}"],
            "reference.mix is 0.5, but",
        ),
        (
            "quick_ppo",
            ["--fabric.precision=16-true", LORA, "--critic.lora.rank=4"],
            "weights round to zero",
        ),
        ("quick_grpo", ["--model.dtype=bfloat16", "--reference.refresh_every=2"], "updates round to 0"),
        ("quick_grpo", ["--model.dtype=float16"], "model.dtype"),
    ],
)
def test_trained_weights_in_bfloat16_are_refused(recipe: str, options: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        parse("fit", ["--recipe", recipe, *options])


def test_frozen_weights_in_bfloat16_are_not() -> None:
    parse("fit", ["--recipe=quick_grpo", "--fabric.precision=bf16-true", LORA])
    parse("fit", ["--recipe=quick_ppo", "--fabric.precision=bf16-true", LORA, "--critic.lora.rank=4"])
    parse("fit", ["--recipe=quick_ppo", "--model.dtype=bfloat16", LORA])
