"""Run by `test_sharded.py` on several ranks: kinds of models that ranks share compute and send what they are.

The words are an option of FSDP2, its number of ranks, and kinds.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric

from rlkit import recipe as sections
from rlkit.base.errors import RecipeError
from rlkit.distributed.fsdp2 import full_tensor, make_fabric
from rlkit.distributed.ranks import Ranks
from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora
from rlkit.models.weights import PolicyWeights
from rlkit.ops.logps import DEFAULT_READS
from rlkit.ops.routes import Routers
from rlkit.recipe import Lora
from rlkit.testing import random_model
from rlkit.train.models import Placer
from tests.flow.test_architectures import KINDS

NO_PLAN = {
    "mamba": "no plan", "mamba2": "no plan", "falcon_h1": "no plan", "lfm2": "no plan", "gpt_oss": "no plan",
}  # fmt: skip
"""Kinds of which transformers divides nothing, or the embedding alone."""


def gradients(module: Any, seed: int) -> dict[str, torch.Tensor]:
    """Return the gradients of a weighted sum of the log-probs of all tokens but the first of each of two rows.

    Experts of the second row are given.
    """
    rows = torch.randint(3, 35, (2, 16), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(rows, dtype=torch.bool)
    mask[:, 0] = False
    actor = getattr(module, "module", module)
    reads = DEFAULT_READS._replace(expert_routes=None if actor.routers is None else routes(actor.routers, rows))
    logps = module(rows, mask, 1.0, reads).logps
    (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
    return {name: full_tensor(p.grad) for name, p in actor.policy.named_parameters() if p.grad is not None}


def routes(routers: Routers, rows: torch.Tensor) -> torch.Tensor:
    """Return routes [B,T,R,K] that the first row leaves open; the others' experts follow from token and layer."""
    first = rows[..., None, None] + torch.arange(len(routers.layers))[:, None]
    selected = (first + torch.arange(routers.top_k)) % routers.experts + 1
    selected[0] = 0
    return selected.to(routers.dtype)


def compare(fabric: Fabric, kind: str, lora: Lora | None) -> None:
    def policy() -> Any:
        model = random_model(kind, **KINDS[kind])
        if lora is None:
            return model
        adapted = add_lora(model, lora)
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data = torch.linspace(-0.02, 0.01, parameter.numel()).view_as(parameter)
        return adapted

    ranks, plain = Ranks(fabric), Actor(policy())
    sent = [pair for bucket in PolicyWeights(plain.policy).buckets() for pair in bucket]
    for index in range(ranks.count):
        expected = gradients(plain, index)  # they accumulate
    divided: Any = Placer(fabric, ranks).set_up(Actor(policy()))
    for name, gradient in gradients(divided, ranks.index).items():
        mean = expected[name] / ranks.count
        gap = (gradient - mean).norm() / mean.norm().clamp(min=1e-6)
        assert gap < 2e-5, f"{kind} {name}: {gap:.1e}"
    if fabric.strategy.expert_parallel > 1:  # type: ignore[attr-defined]
        kept = [m.num_experts for m in divided.modules() if type(m).__name__.endswith("Experts")]
        assert kept, kind
        assert set(kept) == {2}, kind  # of four
    weights = dict(pair for bucket in PolicyWeights(divided.module.policy).buckets() for pair in bucket)
    for name, weight in sent:
        assert torch.equal(weights[name], weight), f"{kind} {name}"


if __name__ == "__main__":
    option, size, kinds = sys.argv[1], int(sys.argv[2]), sys.argv[3:]
    strategy = sections.FSDP2(**{option: size})  # type: ignore[arg-type]
    fabric = make_fabric(sections.Fabric("cpu", int(os.environ["WORLD_SIZE"]), strategy=strategy))
    fabric.launch()
    for kind in kinds:
        if option == "tensor_parallel" and kind in NO_PLAN:
            with pytest.raises(RecipeError, match=NO_PLAN[kind]):
                compare(fabric, kind, None)
            continue
        compare(fabric, kind, None)
        if kind == "qwen3_moe":
            with pytest.raises(RecipeError, match=r"does not (divide|distribute) adapters of experts"):
                compare(fabric, kind, Lora(2, 4))
        mixers = [] if kind == "nemotron_h" else ["out_proj", "in_proj_qkvz"]  # peft refuses those of Mamba layers
        compare(fabric, kind, Lora(2, 4, ["q_proj", "o_proj", *mixers]))
    print("divided")
