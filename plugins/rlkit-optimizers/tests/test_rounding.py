"""Stochastic rounding: the mean is exact, and only neighbours in bfloat16 are chosen."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from rlkit_optimizers import AdamW8bit
from rlkit_optimizers.rounding import stochastically_rounded
from torch import Tensor

from rlkit.base.errors import RecipeError


def rounded(numbers: Tensor, seed: int = 0) -> Tensor:
    return stochastically_rounded(numbers, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("share", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("sign", [1, -1])
def test_a_number_becomes_either_neighbour_with_the_mean_unchanged(share: float, sign: int) -> None:
    """Between 1 and 2, bfloat16's numbers are 2^-7 apart; 100,000 draws have a standard error below 0.0016 of that."""
    step = 2.0**-7
    numbers = torch.full((100_000,), sign * (1 + share * step))
    result = rounded(numbers).float() * sign
    assert set(result.unique().tolist()) == {1.0, 1 + step}
    assert ((result.mean() - 1) / step).item() == pytest.approx(share, abs=0.008)  # five standard errors


def test_what_bfloat16_holds_never_changes() -> None:
    numbers = torch.tensor([0.0, -0.0, 1.0, -3.5, 2.0**-126, 2.0**-133, 3e38], dtype=torch.bfloat16)
    for seed in range(20):
        assert torch.equal(rounded(numbers.float(), seed).view(torch.int16), numbers.view(torch.int16))


def test_numbers_without_a_neighbour_are_rounded_to_the_nearest() -> None:
    largest = torch.finfo(torch.float32).max
    numbers = torch.tensor([math.inf, -math.inf, math.nan, largest])
    assert rounded(numbers)[[0, 1, 3]].tolist() == [math.inf, -math.inf, math.inf]
    assert rounded(numbers)[2].isnan()


def test_equal_seeds_draw_equal_bits() -> None:
    numbers = torch.linspace(-1, 1, 1000)
    assert torch.equal(rounded(numbers, 3), rounded(numbers, 3))
    assert not torch.equal(rounded(numbers, 3), rounded(numbers, 4))


@pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is not None, reason="bitsandbytes is installed")
def test_without_bitsandbytes_the_optimizer_says_how_to_install_it() -> None:
    with pytest.raises(RecipeError, match=r"AdamW8bit needs bitsandbytes: pip install -e '\.\[4bit\]'"):
        AdamW8bit()
