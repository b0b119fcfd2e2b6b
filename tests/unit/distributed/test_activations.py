"""Which tensors are moved to the host between the passes, how many bytes, and that gradients stay as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rlkit_authors.models import random_model
from torch import Tensor, nn

from rlkit.cli.main import main
from rlkit.distributed import activations
from rlkit.distributed.activations import ActivationOffload
from rlkit.distributed.fsdp2 import checkpoint_activations
from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora
from rlkit.recipe import Lora

CPU = torch.device("cpu")
TOKENS, LAYERS, HIDDEN, VOCABULARY = 2 * 33, 2, 32, 264
"""Of two rows, and of the random models."""


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 0)


class Watched(ActivationOffload):
    """Holds what is moved against the weights' memory."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module, CPU)
        self.storages = {p.untyped_storage().data_ptr() for p in module.parameters() if p.ndim > 1}
        self.weights = 0

    def _pack(self, tensor: Tensor) -> object:  # type: ignore[override]
        before, is_weight = self.moved_bytes, tensor.untyped_storage().data_ptr() in self.storages
        saved = super()._pack(tensor)
        self.weights += is_weight
        assert not (is_weight and self.moved_bytes > before), tensor.shape
        return saved


def gradients(model: Actor, *, packed: bool) -> Tensor:
    """Return the gradient of the mean log-prob of two rows."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 200, (2, 33), generator=generator)
    model.passes.packed = packed
    model.zero_grad()
    model(tokens, torch.ones_like(tokens, dtype=torch.bool)).logps.mean().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def make(*, adapters: bool, recompute: bool) -> Actor:
    policy = random_model("qwen2")
    model = Actor(add_lora(policy, Lora(rank=4)) if adapters else policy)
    if recompute:
        checkpoint_activations(model)
    return model


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_the_same(packed: bool, adapters: bool, recompute: bool) -> None:
    model = make(adapters=adapters, recompute=recompute)
    expected = gradients(model, packed=packed)
    offload = Watched(model)
    torch.testing.assert_close(gradients(model, packed=packed), expected, atol=1e-6, rtol=1e-6)
    assert offload.weights
    inputs = LAYERS * TOKENS * HIDDEN * 4
    logits = TOKENS * VOCABULARY * 4
    if recompute:  # beside logits, the layers' inputs, and less than two more of that size for the last norm
        assert inputs <= offload.moved_bytes < 2.5 * inputs + logits
    else:
        assert offload.moved_bytes > 2.5 * inputs + logits
    moved = offload.moved_bytes
    with torch.no_grad():
        model(torch.ones(1, 9, dtype=torch.long), torch.ones(1, 9, dtype=torch.bool))
    assert offload.moved_bytes == moved


@pytest.mark.parametrize(("autocast", "size"), [(False, 4), (True, 2)])
def test_an_activation_is_moved_once_and_weights_never(autocast: bool, size: int) -> None:
    """The layers save their inputs [10,8] and [10,16], the second of which the rectifier saves too."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.ReLU(), nn.Linear(16, 8, bias=False))
    offload = ActivationOffload(model, CPU)
    with torch.autocast("cpu", enabled=autocast):
        output = model(torch.randn(10, 8))
    assert offload.moved_bytes == 10 * (8 + 16) * size
    output.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_small_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "MIN_BYTES", 10 * 16 * 4)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    offload = ActivationOffload(model, CPU)
    model(torch.randn(10, 8))
    assert offload.moved_bytes == 10 * 16 * 4


def test_a_pass_that_fails_leaves_no_hooks() -> None:
    model = nn.Sequential(nn.Linear(8, 16))
    offload = ActivationOffload(model, CPU)
    with pytest.raises(RuntimeError):
        model(torch.randn(10, 7))
    moved = offload.moved_bytes
    nn.Linear(8, 16)(torch.randn(10, 8)).sum().backward()
    assert offload.moved_bytes == moved


def test_a_run_without_a_gpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--recipe=quickstart", "--train.offload_activations=true", f"--out={tmp_path / 'run'}"]) == 2
    assert "but this run has no GPU; set it to false" in capsys.readouterr().err
