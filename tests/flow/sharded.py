"""Run by `test_sharded.py` on several ranks: the weights' stream of a sharded policy, with and without adapters, and
optimizers of its shards.

Only the first rank has loaded the weights.
"""

from __future__ import annotations

import asyncio
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from rlkit_engine_torch.probe import why_not

from rlkit import recipe as sections
from rlkit.base.errors import RecipeError, RlkitError
from rlkit.distributed.fsdp2 import make_fabric, unsharded
from rlkit.distributed.ranks import Ranks, SideGroup
from rlkit.interfaces.optimizer import Optimizer
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.models.lora import base_model
from rlkit.models.weights import PolicyWeights, full_state_dict
from rlkit.ops.random import RowNoise
from rlkit.optimizers import AdamW, Muon
from rlkit.recipe import Lora, Model, Train
from rlkit.testing import save_random_model
from rlkit.train.models import Placer
from rlkit.train.optim import make_optimizer
from tests.unit.models.test_experts import EXPERTS

BUCKET = 100_000


def stream(fabric: Fabric, lora: Lora | None, path: str = "tiny") -> None:
    model = Model(path, lora=lora)
    plain, actor = load_policy(model), Actor(load_policy(model, empty=fabric.global_rank > 0))
    assert fabric.is_global_zero or all(x.is_meta for x in actor.parameters())
    if lora:
        for policy in (plain, actor.policy):
            for name, parameter in policy.named_parameters():
                if "lora_B" in name:
                    torch.nn.init.constant_(parameter, 0.01)
    expected = dict(pair for bucket in PolicyWeights(plain).buckets() for pair in bucket)
    module = Placer(fabric, Ranks(fabric)).set_up(actor)
    if fabric.strategy.precision.precision == "bf16-mixed" and path == "tiny":
        compute_in_half(fabric, module, expected)
    weights = PolicyWeights(actor.policy, BUCKET)
    assert list(weights.specs) == list(expected)
    largest = max(t.numel() * t.element_size() for t in expected.values())
    before: list[weakref.ref[torch.Tensor]] = []
    seen = 0
    for bucket in weights.buckets():
        assert all(ref() is None for ref in before), "a bucket is kept while the next is made"
        assert sum(t.numel() * t.element_size() for _, t in bucket) <= BUCKET + largest
        for name, tensor in bucket:
            assert weights.specs[name] == (tuple(tensor.shape), tensor.dtype)
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-5)
            seen += 1
        before = [weakref.ref(tensor) for _, tensor in bucket]
        del bucket, tensor
    assert seen == len(expected)
    state = full_state_dict(actor.policy, keep=fabric.is_global_zero)
    assert set(state) == ({n for n, _ in plain.named_parameters()} if fabric.is_global_zero else set())


def shard(fabric: Fabric, count: int) -> None:
    """Each rank holds its share of the weights, and those of a group hold all of them."""
    placer = Placer(fabric, Ranks(fabric))
    module: Any = placer.set_up(Actor(load_policy(Model("tiny"), empty=placer.empty)))
    matrices = {name: x for name, x in module.named_parameters() if "_proj.weight" in name}
    assert len(matrices) > 10
    for name, matrix in matrices.items():
        assert matrix.to_local().numel() * count == matrix.numel(), name


def compute_in_half(fabric: Fabric, module: Any, expected: dict[str, torch.Tensor]) -> None:
    """What is gathered is bfloat16, weights and gradients are float32, and probabilities are about those of float32."""
    tokens = torch.arange(3, 43).reshape(2, 20)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    with unsharded(module), torch.no_grad():
        assert {x.dtype for x in module.parameters()} == {torch.bfloat16}
    out = module(tokens, mask)
    with unsharded(module):
        assert why_not(base_model(module.policy)) is None  # or TorchEngine would take the slow path
    fabric.backward(-out.logps.mean())
    assert {x.dtype for x in module.parameters()} == {torch.float32}
    assert {x.grad.dtype for x in module.parameters() if x.grad is not None} == {torch.float32}
    plain = load_policy(Model("tiny"))
    plain.load_state_dict(expected, strict=False)
    torch.testing.assert_close(out.logps.exp(), Actor(plain)(tokens, mask).logps.exp(), atol=0.05, rtol=0.0)


def optimize(fabric: Fabric, optimizer: Optimizer) -> None:
    """Two updates of the shards are those of the whole matrices."""
    plain = Actor(load_policy(Model("tiny")))
    placer = Placer(fabric, Ranks(fabric))
    sharded: Any = placer.set_up(Actor(load_policy(Model("tiny"), empty=placer.empty)))
    tokens = torch.arange(3, 43).reshape(2, 20)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for module in (plain, sharded):
        made = make_optimizer(module, Train(steps=2, lr=0.01, weight_decay=0.1, optimizer=optimizer))
        for _ in range(2):
            (-module(tokens, mask).logps.mean()).backward()
            made.step()
            made.zero_grad()
    before = dict(load_policy(Model("tiny")).named_parameters())
    after = full_state_dict(sharded.module.policy, keep=True)
    for name, expected in plain.policy.named_parameters():
        torch.testing.assert_close(after[name], expected.detach(), atol=1e-4, rtol=1e-4, msg=name)
        assert (expected - before[name]).abs().max() > 1e-3, name


def agree(fabric: Fabric) -> None:
    """What the last rank alone knows, all know afterwards, those of tensor-parallel groups included."""
    ranks, last = Ranks(fabric), fabric.global_rank == fabric.world_size - 1
    assert [ranks.any(last), ranks.any(False), ranks.all(last), ranks.all(True)] == [True, False, False, True]
    assert asyncio.run(SideGroup(fabric).any_async(last))
    assert ranks.same({"rank": fabric.global_rank}) == {"rank": 0}
    assert ranks.gather_world(fabric.global_rank) == list(range(fabric.world_size))
    own = RecipeError(f"of rank {fabric.global_rank}")
    with pytest.raises(RlkitError, match=f"of rank {fabric.global_rank or 1}"):  # its own, if it has one
        ranks.raise_any(own if fabric.global_rank else None)
    ranks.raise_any(None)


def noise(fabric: Fabric, lora: Lora | None) -> None:
    """Noise on the embeddings of sharded weights is that of whole ones."""
    model, placer = Model("tiny", lora=lora), Placer(fabric, Ranks(fabric))
    plain, actor = Actor(load_policy(model)), Actor(load_policy(model, empty=placer.empty))
    sharded = placer.set_up(actor)
    tokens = torch.arange(3, 43).reshape(2, 20)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    added = RowNoise(torch.tensor([1, 2]), torch.tensor([2.0, 3.0]))
    quiet, *noisy = (
        module(tokens, mask, noise=of).logps for module, of in ((plain, None), (plain, added), (sharded, added))
    )
    torch.testing.assert_close(*noisy, atol=1e-4, rtol=1e-4)
    assert (quiet - noisy[0]).abs().max() > 0.01


if __name__ == "__main__":
    ranks = int(os.environ["WORLD_SIZE"])
    strategy = sections.FSDP2(tensor_parallel=int(sys.argv[1]), replicate=int(sys.argv[3]))
    fabric = make_fabric(sections.Fabric("cpu", ranks, strategy=strategy, precision=sys.argv[2]))
    fabric.launch()
    agree(fabric)
    shard(fabric, ranks // strategy.replicate)
    for lora in (None, Lora(rank=4)):
        stream(fabric, lora)
        if sys.argv[2] == "32-true":
            noise(fabric, lora)
    if strategy.tensor_parallel == 1:
        stream(fabric, Lora(rank=4, use_dora=True))
        mixture = save_random_model(Path("mixture"), "qwen3_moe", **EXPERTS["qwen3_moe"])  # on the first rank alone
        fabric.barrier()
        stream(fabric, Lora(rank=4), str(mixture))
    if sys.argv[2] == "32-true":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)  # Muon's own rounding would hide a difference
            for optimizer in (AdamW(eps=1e-4), Muon(eps=1e-4)):
                optimize(fabric, optimizer)
    print("streamed")
