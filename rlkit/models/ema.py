"""An exponential moving average of trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class WeightAverage:
    """The average of a module's trainable parameters: average = decay * average + (1 - decay) * parameter.

    Args:
        module: The module.
        decay: From 0 (no memory) to 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.tensors = [p.detach().clone() for p in self._parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step."""
        for average, parameter in zip(self.tensors, self._parameters, strict=True):
            average.lerp_(parameter, 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Swap the average into the module within the context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self.tensors, self._parameters, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
