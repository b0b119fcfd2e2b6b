"""Run by `test_sharded.py` on several ranks: how much of a sharded model a rank holds, while it learns and is asked."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from rlkit_servers.weight_check import policy_logps
from torch import nn
from torch.distributed.tensor import DTensor

from rlkit import recipe as sections
from rlkit.cli.main import main
from rlkit.distributed.fsdp2 import blocks, make_fabric
from rlkit.models.actor import Actor
from rlkit.models.load import load_policy
from rlkit.models.lora import base_model
from rlkit.models.size import find_config, size_of
from rlkit.recipe import Model
from tests.conftest import FAST


def local_bytes(tensors: Any) -> int:
    """Return the bytes of tensors on this rank: of sharded ones their own part, of gathered ones all."""
    return sum(x.numel() * x.element_size() for t in tensors for x in [t.to_local() if isinstance(t, DTensor) else t])


def gradients() -> list[int]:
    """Train for a step; return the bytes of gradients that this rank held after each backward pass."""
    held: list[int] = []
    backward, modules = Fabric.backward, []
    setup_module = Fabric.setup_module

    def set_up(fabric: Fabric, module: nn.Module, **options: Any) -> Any:
        modules.append(module)
        return setup_module(fabric, module, **options)

    def measured(fabric: Fabric, loss: Any) -> None:
        backward(fabric, loss)
        held.append(local_bytes(p.grad for p in modules[0].parameters() if p.grad is not None))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fabric, "setup_module", set_up)
        patch.setattr(Fabric, "backward", measured)
        options = (
            "--recipe=quickstart", *FAST, "--train.steps=1", "--train.max_tokens_per_micro_batch=64", "--out=run",
            "--fabric.devices=2", "--fabric.strategy=fsdp2", "--validation=null", "--log.rollouts.every=0",
        )  # fmt: skip
        assert main(["fit", *options]) == 0
    return held


def asked(fabric: Fabric) -> tuple[int, int, int, int]:
    """Check log-probs as an engine does; return the model's bytes, the most that this rank held, share and layers."""
    model = Model("tiny")
    plain, actor = load_policy(model), Actor(load_policy(model, empty=fabric.global_rank > 0))
    layers = blocks(actor)  # before their classes' names change
    fabric.setup_module(actor)
    held: list[int] = []
    for block in layers:
        for module in block.modules():  # those inside of a block see it gathered
            module.register_forward_hook(lambda *_: held.append(local_bytes(actor.parameters())))
    runtime: Any = SimpleNamespace(policy=base_model(actor.policy), device=fabric.device, logits=actor.logits)
    rows = [[5, 9, 20, 31], [7, 7, 12], [40, 3, 2, 8, 45, 61, 3, 9, 11]]
    share = local_bytes(actor.parameters())
    found = policy_logps(runtime, rows)
    with torch.no_grad():
        for row, logps in zip(rows, found, strict=True):
            expected = torch.log_softmax(plain(torch.tensor([row])).logits[0].float(), -1)
            torch.testing.assert_close(logps, expected, atol=1e-5, rtol=1e-4)
    assert local_bytes(actor.parameters()) == share, "something stays gathered"
    return local_bytes(plain.parameters()), max(held), share, len(layers)


if __name__ == "__main__":
    trained = size_of(find_config(Model("tiny")), None, False).trained
    held = gradients()
    planned = 4 * trained // 2  # as `footprint.memory` has it: float32, divided by the ranks
    assert len(held) > 2, held
    assert all(abs(one / planned - 1) < 0.02 for one in held), (held, planned)
    fabric = make_fabric(sections.Fabric("cpu", int(os.environ["WORLD_SIZE"]), strategy=sections.FSDP2()))
    fabric.launch()
    whole, most, share, layers = asked(fabric)
    print(
        f"gradients {held} of {planned} planned; asked: {share} at rest, {most} at most, {whole} whole, {layers} layers"
    )
    assert share < most < whole - (whole - share) // (2 * layers)
