"""Random numbers as a function of a key and a counter, independent of the order of a batch."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Return uniform numbers in (0, 1), one for each key [N] i64 and counter [N] i64, as [N] f64.

    The generator is SplitMix64 (Steele, Lea and Flood 2014) evaluated at `key + counter * golden`.
    """
    z = keys + (counters + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return (_shift(z, 11).to(torch.float64) + 0.5) * 2.0**-53


def permutation(key: str, size: int) -> Tensor:
    """Return a permutation [size] i64 that depends on the key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned integer would."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
