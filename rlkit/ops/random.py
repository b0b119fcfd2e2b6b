"""Random numbers as a function of a key and a counter, independent of the order of a batch."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB

CHUNK_SIZE = 2**22
"""Maximum numbers of noise that are drawn at once; each takes several 64-bit integers of memory."""


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Return uniform numbers [N] f64 in (0, 1), one for each key [N] i64 and counter [N] i64; shapes broadcast.

    The generator is SplitMix64 (Steele, Lea and Flood 2014) evaluated at `key + counter * golden`.
    """
    z = keys + (counters + 1) * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return (_shift(z, 11).to(torch.float64) + 0.5) * 2.0**-53


class RowNoise(NamedTuple):
    """Uniform noise for the tokens of rows, a function of the row's key, the token's position and the column alone.

    Args:
        keys: [B] i64, the key of each row.
        bounds: [B] f32, the maximum norm of a token's noise.
    """

    keys: Tensor
    bounds: Tensor

    @classmethod
    def of_rows(cls, key: str, tokens: Tensor, lengths: Tensor, group: Tensor, bounds: Tensor) -> Self:
        """Return noise for rows, keyed by their first `lengths` [B] tokens of [B,T] i64 and their group [B] i64.

        The order of rows does not matter. Equal rows of one group get different noise.
        """
        counts = Counter[bytes]()
        keys = []
        for row, length, group_id in zip(tokens.cpu().numpy(), lengths.tolist(), group.tolist(), strict=True):
            content = f"{key}/{group_id}/".encode() + row[:length].tobytes()
            digest = hashlib.blake2b(content + b"/%d" % counts[content], digest_size=8).digest()
            keys.append(int.from_bytes(digest, "little", signed=True))
            counts[content] += 1
        return cls(torch.tensor(keys, dtype=torch.long, device=group.device), bounds)

    def rows(self, index: Sequence[int]) -> Self:
        """Return the noise of the rows at the indices."""
        return type(self)(self.keys[index], self.bounds[index])

    def draw(self, rows: Tensor, positions: Tensor, width: int) -> Tensor:
        """Return noise [N,width] f32 for tokens by row [N] i64 and position [N] i64, within +- bound / sqrt(width)."""
        columns = torch.arange(width, device=positions.device)
        noise = torch.empty(len(positions), width, device=positions.device)
        bounds = self.bounds[rows, None] / width**0.5
        size = max(1, CHUNK_SIZE // width)
        for part in (slice(start, start + size) for start in range(0, len(positions), size)):
            counters = positions[part, None] * width + columns
            numbers = uniform(self.keys[rows[part], None], counters)
            noise[part] = (2 * numbers - 1).float() * bounds[part]
        return noise


def permutation(key: str, size: int) -> Tensor:
    """Return a permutation [size] i64 that depends on the key alone."""
    digest = hashlib.blake2b(key.encode(), digest_size=6).digest()
    return torch.randperm(size, generator=torch.Generator().manual_seed(int.from_bytes(digest, "little")))


def _shift(z: Tensor, bits: int) -> Tensor:
    """Shift right logically: zeros enter at the left."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
