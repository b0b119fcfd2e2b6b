"""Several of torch's optimizers as one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch


class Combined(torch.optim.Optimizer):
    """Steps several optimizers of different weights, whose parameter groups and state it shares.

    Args:
        optimizers: Each of other weights.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = optimizers
        self.param_groups = [group for one in optimizers for group in one.param_groups]
        self.state = defaultdict(dict)
        for one in optimizers:
            self.state.update(one.state)
            one.state = self.state

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Step each of them.

        Raises:
            ValueError: There is a closure, which some would call more often than others.
        """
        if closure is not None:
            raise ValueError("Combined.step takes no closure")
        for one in self.optimizers:
            one.step()
