"""The parts of decoding through fused weights."""

from __future__ import annotations

import pytest
import torch

from rlkit.engines.torch.blocks import PACKED_SIZE, Matrix, Packed
from rlkit.engines.torch.fused import GROWTH, FusedDecoder
from rlkit.testing import random_model


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


def test_rows_that_joined_after_the_cache_was_made_smaller_may_move_before_their_first_step() -> None:
    """Row 0 is alone while the cache widens; of three that join, the first two end at once."""
    model = random_model("qwen2").eval()
    decoder = FusedDecoder(model)
    decoder.admit([[5, 3, 4]], [4])
    decoder.step(torch.tensor([6, 7, 8, 9]))
    decoder.keep([0])
    for _ in range(GROWTH + 1):
        decoder.step(torch.tensor([6]))
    decoder.admit([[4, 8]], [3])
    decoder.keep([3, 0])
    found = decoder.step(torch.tensor([9, 7]))
    rows = [[4, 8, 9], [5, 3, 4, *[6] * (GROWTH + 2), 7]]
    with torch.no_grad():
        expected = torch.stack([model(input_ids=torch.tensor([row])).logits[0, -1] for row in rows])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
