"""Several of torch's optimizers as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Combined(torch.optim.Optimizer):
    """Steps several optimizers of different weights; it shares their parameter groups and state.

    Args:
        optimizers: Optimizers of disjoint weights.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for optimizer in optimizers for group in optimizer.param_groups], {})
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = defaultdict(dict)
        for optimizer in optimizers:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each optimizer.

        Raises:
            ValueError: A closure is given, which the optimizers would call different numbers of times.
        """
        if closure is not None:
            raise ValueError("Combined.step takes no closure")
        for optimizer in self.optimizers:
            optimizer.step()
