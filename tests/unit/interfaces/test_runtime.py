"""What parts are given by the run that binds them."""

from __future__ import annotations

import torch

from rlkit.advantages import GRPO
from rlkit.interfaces.runtime import ReducingPart
from rlkit.losses import ClipLoss


class TwoRanks:
    """A runtime whose other rank has the same rows."""

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x, x))


def test_a_part_with_a_formula_computes_over_the_ranks_of_the_run_that_binds_it() -> None:
    parts: list[ReducingPart] = [GRPO(), ClipLoss()]
    for part in parts:
        rows = torch.tensor([3.0, 4.0])
        assert (part.reduce(rows).tolist(), part.gather(rows).tolist()) == ([3, 4], [3, 4])
        part.bind(TwoRanks())  # type: ignore[arg-type]
        assert (part.reduce(rows).tolist(), part.gather(rows).tolist()) == ([6, 8], [3, 4, 3, 4])
