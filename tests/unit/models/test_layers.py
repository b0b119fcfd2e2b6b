"""Layers that compute in fewer passes have the outputs and gradients of their own."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from rlkit_engine_torch import layers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlkit.models.actor import Actor
from rlkit.models.lora import add_lora
from rlkit.recipe import Lora
from rlkit.testing import random_model
from tests.unit.models.test_packing import rows_of

KINDS = ["llama", "mistral", "qwen2", "qwen3"]


@pytest.fixture(autouse=True)
def as_on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fuse layers on this machine too, where they compute the same."""
    monkeypatch.setattr("rlkit_engine_torch.layers.on_gpu", lambda _: True)


def model(kind: str, adapters: bool) -> Any:
    made = random_model(kind)
    if adapters:
        made = add_lora(made, Lora(rank=4, alpha=8), 0)
        torch.manual_seed(1)
        for name, weight in made.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(weight, 0, 0.1)
    return made


def run(made: Any) -> list[Tensor]:
    """Return hidden states and the gradients of all weights."""
    made.zero_grad()
    found = made(input_ids=torch.tensor([[5, 3, 4, 6, 9], [7, 7, 8, 3, 5]]), use_cache=False).logits
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    return [found.detach(), *(p.grad for p in made.parameters() if p.grad is not None)]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_the_same(kind: str, adapters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(kind, adapters)
    expected = run(made)
    layers.FusedLayers().fuse(made)
    found, used = run(made), []
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
    for name in ("RMSNormFunction", "SumRMSNormFunction", "SwiGLUFunction"):
        function = getattr(layers, name)
        monkeypatch.setattr(function, "apply", lambda *x, n=name, f=function.apply: (used.append(n), f(*x))[1])
    run(made)
    assert {name: used.count(name) for name in set(used)} == {
        "RMSNormFunction": 7 if kind == "qwen3" else 3, "SumRMSNormFunction": 2, "SwiGLUFunction": 2,
    }  # fmt: skip


def run_packed(actor: Actor) -> list[Tensor]:
    """Return log-probs of rows of which two share a prompt, and the gradients of all weights."""
    actor.zero_grad()
    tokens, mask = rows_of([9, 4], [[3, 7], [5]], 0)
    logps = actor(tokens, mask).logps
    (logps * torch.linspace(-1, 1, logps.numel()).view_as(logps)).sum().backward()
    return [logps.detach(), *(p.grad for p in actor.parameters() if p.grad is not None)]


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_passes_that_rotate_at_once_are_the_same(
    kind: str, adapters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; and in bfloat16 the errors are those of the layers' own passes."""
    actor, rotated = Actor(model(kind, adapters)), []
    rotate = layers.RotationFunction.apply
    monkeypatch.setattr(layers.RotationFunction, "apply", lambda *x: (rotated.append(1), rotate(*x))[1])
    assert actor.passes.packed
    errors = []
    monkeypatch.setattr("rlkit_engine_torch.layers.on_gpu", lambda _: False)
    exact = run_packed(actor)
    assert not rotated
    for on_gpu in (True, False):
        monkeypatch.setattr("rlkit_engine_torch.layers.on_gpu", lambda _, fused=on_gpu: fused)
        for one, other in zip(run_packed(actor), exact, strict=True):
            assert (one - other).norm() <= 1e-5 * other.norm()
        with torch.autocast("cpu", torch.bfloat16):
            half = run_packed(actor)
        errors.append([(one - other).flatten() for one, other in zip(half, exact, strict=True)])
    assert len(rotated) == 4  # two layers, two passes
    for part in (slice(1), slice(1, None)):
        fused, own = (torch.cat(found[part]).norm() for found in errors)
        assert 0 < fused <= 1.25 * own


@pytest.mark.parametrize(("adapters", "frozen"), [(False, "float32"), (True, "float32"), (True, "bfloat16")])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_exact_as_that_of_autocast(kind: str, adapters: bool, frozen: str) -> None:
    """Errors of outputs and gradients against those in float32; rounding twice would make them 1.4 times as large."""
    made = model(kind, adapters)
    frozen_weights = [weight for weight in made.parameters() if not weight.requires_grad]
    for weight in frozen_weights:
        weight.data = weight.to(getattr(torch, frozen)).float()
    exact = run(made)
    for weight in frozen_weights:
        weight.data = weight.to(getattr(torch, frozen))
    with torch.autocast("cpu", torch.bfloat16):
        plain = run(made)
        layers.FusedLayers().fuse(made)
        fused = run(made)
    assert [x.dtype for x in fused] == [x.dtype for x in plain]
    for part in (slice(1), slice(1, None)):
        errors = [
            torch.cat([(x - y).flatten() for x, y in zip(actual[part], exact[part], strict=True)]).norm()
            for actual in (fused, plain)
        ]
        assert 0 < errors[0] <= 1.25 * errors[1]


@pytest.mark.parametrize("kind", ["float64", "autocast", "cpu"])
def test_other_types_and_devices_are_left_to_the_layers(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model("qwen2", adapters=False)
    if kind == "float64":
        made.double()
    if kind == "cpu":
        monkeypatch.setattr("rlkit_engine_torch.layers.on_gpu", lambda _: False)
    with torch.autocast("cpu", torch.float16) if kind == "autocast" else nullcontext():
        expected = run(made)
        layers.FusedLayers().fuse(made)
        for name in ("RMSNormFunction", "SumRMSNormFunction", "SwiGLUFunction", "ProductsFunction"):
            monkeypatch.delattr(layers, name)
        assert all(map(torch.equal, run(made), expected))


def test_weights_are_converted_once_for_a_generation() -> None:
    """Autocast keeps weights that it has converted; inputs are converted at each of three steps."""
    layer, converted = torch.nn.Linear(4, 6), []
    layers.FusedLayers().fuse(layer)

    class Conversions(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default:
                converted.append(tuple(args[0].shape))
            return function(*args, **kwargs or {})

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), Conversions():
        for _ in range(3):
            layer(torch.zeros(1, 4))
    assert converted.count((6, 4)) == 1


@pytest.mark.parametrize("shape", [(0, 4), (1, 0, 4), (4,)])
def test_products_of_any_number_of_rows(shape: tuple[int, ...]) -> None:
    """Of no token, as an expert may have, and of a vector."""
    layer = torch.nn.Linear(4, 6)
    layers.FusedLayers().fuse(layer)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(torch.ones(shape))
    output.sum().backward()
    assert output.shape == (*shape[:-1], 6)
    assert layer.weight.grad is not None
    assert layer.weight.grad.sum() == (0 if 0 in shape else 24)


def test_rotations_by_hand() -> None:
    """By 90 and 0 degrees: (x1, x2, x3, x4) becomes (-x3, x2, x1, x4), and the gradient is rotated back."""
    queries, keys = (torch.tensor([[[1.0, 2.0, 3.0, 4.0]]], requires_grad=True) for _ in range(2))
    cos, sin = torch.tensor([[0.0, 1.0, 0.0, 1.0]]), torch.tensor([[1.0, 0.0, 1.0, 0.0]])
    found = layers.RotationFunction.apply(queries, keys, cos, sin)  # type: ignore[no-untyped-call]
    assert [x.tolist() for x in found] == [[[[-3.0, 2.0, 1.0, 4.0]]]] * 2
    torch.autograd.backward(found, [found[0].detach(), torch.ones(1, 1, 4)])
    assert queries.grad is not None
    assert keys.grad is not None
    assert queries.grad.tolist() == [[[1.0, 2.0, 3.0, 4.0]]]
    assert keys.grad.tolist() == [[[1.0, 1.0, -1.0, 1.0]]]


def test_rms_norm_by_hand() -> None:
    """x = (3, 4): rms = sqrt(12.5 + eps); with dy = (1, 0), dx = (w / rms) (1 - 9 / 25, -12 / 25)."""
    x, weight = torch.tensor([[3.0, 4.0]], requires_grad=True), torch.tensor([2.0, 2.0], requires_grad=True)
    _, found = layers.RMSNormFunction.apply(x, weight, 0.0)  # type: ignore[no-untyped-call]
    assert found.tolist() == [pytest.approx([6 / 12.5**0.5, 8 / 12.5**0.5])]
    found.backward(torch.tensor([[1.0, 0.0]]))
    assert x.grad is not None
    assert weight.grad is not None
    assert x.grad.tolist() == [pytest.approx([2 / 12.5**0.5 * 16 / 25, -2 / 12.5**0.5 * 12 / 25])]
    assert weight.grad.tolist() == pytest.approx([3 / 12.5**0.5, 0.0])
