"""Products by the faster library have the outputs and gradients of torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rlkit_engine_torch.layers import FusedLayers
from torch import nn

from rlkit.ops import products
from rlkit.ops.products import MAX_ROWS, MIN_OPERATIONS, ROWS, product

ZEN = {"avx512_f": True, "cpu_name": "AMD EPYC"}


@pytest.fixture
def multiplied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what oneDNN multiplies, on any CPU."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this torch has no oneDNN")
    shapes: list[tuple[int, ...]] = []
    own = products._by_onednn

    def recorded(x: torch.Tensor, *others: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return own(x, *others)

    monkeypatch.setattr(products, "outpaces_mkl", lambda: True)
    monkeypatch.setattr(products, "_by_onednn", recorded)
    return shapes


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2 * ROWS, 128), (1, 2 * ROWS, 128), (2, ROWS, 128)])
def test_outputs_and_gradients_are_those_of_torch(
    shape: tuple[int, ...], bias: bool, multiplied: list[tuple[int, ...]]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(128, 136, bias=bias)
    x, pull = torch.randn(shape, requires_grad=True), torch.randn(*shape[:-1], 136)
    leaves = [x, *layer.parameters()]
    expected = layer(x)
    expected_grads = torch.autograd.grad((expected * pull).sum(), leaves)
    assert multiplied == []
    FusedLayers().fuse(layer)
    actual = layer(x)
    actual_grads = torch.autograd.grad((actual * pull).sum(), leaves)
    assert multiplied == [shape, (*shape[:-1], 136), (136, 2 * ROWS)]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual_grads, expected_grads, rtol=1e-5, atol=1e-4)


def test_a_bias_may_have_gaps(multiplied: list[tuple[int, ...]]) -> None:
    x, weight, bias = torch.ones(ROWS, 256), torch.ones(256, 256), torch.arange(512.0)[::2]
    assert torch.equal(product(x, weight, bias), (256 + bias).expand(ROWS, -1))
    assert multiplied


def test_gradients_that_nobody_needs_are_not_computed(multiplied: list[tuple[int, ...]]) -> None:
    """A frozen layer under adapters, and the first layer."""
    x, weight = torch.randn(2 * ROWS, 128), torch.randn(136, 128)
    torch.autograd.grad(product(x.requires_grad_(), weight).sum(), x)
    assert multiplied == [(2 * ROWS, 128), (2 * ROWS, 136)]
    multiplied.clear()
    torch.autograd.grad(product(x.detach(), weight.requires_grad_()).sum(), weight)
    assert multiplied == [(2 * ROWS, 128), (136, 2 * ROWS)]


@pytest.mark.parametrize(
    ("shape", "outputs", "dtype", "expected"),
    [
        ((ROWS, 128), MIN_OPERATIONS // ROWS // 128, torch.float32, True),
        ((ROWS, 128), MIN_OPERATIONS // ROWS // 128 - 1, torch.float32, False),
        ((2 * ROWS - 1, 256), 256, torch.float32, False),  # oneDNN would compile kernels for each number of rows
        ((MAX_ROWS, 256), 256, torch.float32, True),
        ((MAX_ROWS + ROWS, 256), 256, torch.float32, False),  # whose kernels would take megabytes
        ((ROWS, 256), 256, torch.float64, False),
        ((ROWS, 256), 256, torch.bfloat16, False),  # which torch leaves to oneDNN itself
    ],
)
def test_large_products_of_few_numbers_of_rows_are_onednns(
    shape: tuple[int, int], outputs: int, dtype: torch.dtype, expected: bool, multiplied: list[tuple[int, ...]]
) -> None:
    x, weight = torch.ones(shape, dtype=dtype), torch.ones(outputs, shape[1], dtype=dtype)
    assert torch.equal(product(x, weight), torch.full((shape[0], outputs), shape[1], dtype=dtype))
    assert bool(multiplied) == expected


def test_layers_under_autocast_and_in_float64_are_left_to_torch(multiplied: list[tuple[int, ...]]) -> None:
    layer, x = nn.Linear(256, 256), torch.ones(ROWS, 256)
    FusedLayers().fuse(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    layer.double()
    assert layer(x.double()).dtype == torch.float64
    assert multiplied == []


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        (ZEN, True),
        (ZEN | {"avx512_f": False}, False),  # where MKL is 1.1 times as fast
        (ZEN | {"cpu_name": "Intel(R) Xeon(R)"}, False),
        ({"avx512_f": True}, False),
        ({}, False),
    ],
)
def test_onednn_outpaces_mkl_on_amd_with_avx512(
    capabilities: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert products.outpaces_mkl.__wrapped__() == (expected and hasattr(torch.ops.mkldnn, "_linear_pointwise"))
