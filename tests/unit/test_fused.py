"""The parts of decoding through fused weights."""

from __future__ import annotations

import pytest
import torch

from rlkit.engines.torch.blocks import PACKED_SIZE, Matrix, Packed


@pytest.mark.parametrize("rows", [1, 7, 128])
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_layers_compute_what_plain_ones_do(rows: int, with_bias: bool) -> None:
    torch.manual_seed(rows)
    plain = Matrix(torch.randn(500, 300) / 17, torch.randn(500) if with_bias else None)
    packed = plain.to(torch.float32)
    assert isinstance(packed, Packed)
    x, other = torch.randn(rows, 300), torch.randn(rows, 500)
    torch.testing.assert_close(packed(x), plain(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.plus(x, other), plain(x) + other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.times(x, other), plain(x) * other, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed.silu(x), torch.nn.functional.silu(plain(x)), rtol=1e-5, atol=1e-5)


def test_small_layers_and_half_precision_ones_are_not_packed() -> None:
    assert not isinstance(Matrix(torch.zeros(PACKED_SIZE // 8 - 1, 8), None).to(torch.float32), Packed)
    assert not isinstance(Matrix(torch.zeros(500, 300), None).to(torch.bfloat16), Packed)
