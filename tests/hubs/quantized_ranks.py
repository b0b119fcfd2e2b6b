"""Run by test_quantization.py on two ranks: a base in 4 bits that is sharded learns as a whole one, with half of it.

usage: python quantized_ranks.py PRECISION DORA
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from rlkit import recipe as sections
from rlkit.distributed.fsdp2 import full_tensor, make_fabric
from rlkit.distributed.ranks import Ranks
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.models.weights import PolicyWeights
from rlkit.ops.quantization import PARTS, QuantizedLinear
from rlkit.recipe import Lora, Model
from rlkit.train.models import Placer

TOKENS = torch.arange(2, 82).view(4, 20)


def start(model: Model, empty: bool = False) -> Actor:
    """Load a policy whose adapters differ from the base."""
    actor = Actor(load_policy(model, empty=empty))
    torch.manual_seed(1)
    for name, weight in actor.policy.named_parameters():
        if "lora_B" in name and not weight.is_meta:
            torch.nn.init.normal_(weight, 0, 0.1)
    return actor


def gradients(actor: Actor, module: Any, rows: torch.Tensor, backward: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of the mean log-prob of all rows, of which this process has some."""
    backward(-module(rows, torch.ones_like(rows, dtype=torch.bool)).logps.mean())
    return {name: full_tensor(x.grad) for name, x in actor.policy.named_parameters() if x.grad is not None}


if __name__ == "__main__":
    precision, dora = sys.argv[1], sys.argv[2] == "true"
    fabric = make_fabric(sections.Fabric("cpu", 2, strategy=sections.FSDP2(), precision=precision))  # type: ignore[arg-type]
    fabric.launch()
    model = Model("tiny", Lora(4, use_dora=dora), quantization="nf4")
    plain = start(model)
    placer = Placer(fabric, Ranks(fabric))
    sharded = start(model, placer.empty)
    module: Any = placer.set_up(sharded)

    layers = [layer for layer in sharded.modules() if isinstance(layer, QuantizedLinear)]
    held = sum(getattr(layer, part).to_local().nbytes for layer in layers for part in PARTS)
    whole = sum(x.nbytes for x in plain.parameters() if x.dtype == torch.uint8)
    assert len(layers) > 10
    assert 0.5 * whole <= held < 0.51 * whole, (held, whole)

    expected = dict(pair for bucket in PolicyWeights(plain.policy).buckets() for pair in bucket)
    weights = PolicyWeights(sharded.policy, bucket_bytes=2**16)
    assert list(weights.specs) == list(expected)
    for bucket in weights.buckets():
        for name, tensor in bucket:
            torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=1e-6, msg=name)

    with fabric.autocast():
        whole_gradients = gradients(plain, plain, TOKENS, torch.Tensor.backward)
    rows = TOKENS.view(2, 2, -1)[fabric.global_rank]
    parts = gradients(sharded, module, rows, fabric.backward)
    assert parts.keys() == whole_gradients.keys()
    if precision == "32-true":
        for name, gradient in parts.items():
            largest = whole_gradients[name].abs().max()
            assert (gradient - whole_gradients[name]).abs().max() < 1e-5 * largest, name
    else:  # sums in bfloat16, in another order
        vectors = [torch.cat([x[name].flatten() for name in parts]) for x in (parts, whole_gradients)]
        assert (vectors[0] - vectors[1]).norm() < 0.1 * vectors[1].norm()
    print("equal")
