"""An exponential moving average of trainable parameters."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """The average of a module's trainable parameters: average = decay * average + (1 - decay) * parameter.

    It is a module with buffers only, so that it can be moved between devices.

    Args:
        module: The module to average.
        decay: The decay, from 0 (no memory) to 1.
    """

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self._trained = [p for p in module.parameters() if p.requires_grad]
        for i, parameter in enumerate(self._trained):
            self.register_buffer(str(i), parameter.detach().clone())

    @property
    def tensors(self) -> list[Tensor]:
        """The averages, in the order of the parameters."""
        return list(self.buffers())

    @torch.no_grad()
    def update(self) -> None:
        """Update the average after a step."""
        for average, parameter in zip(self.tensors, self._trained, strict=True):
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
        for average, parameter in zip(self.tensors, self._trained, strict=True):
            parameter_copy = parameter.clone()
            parameter.copy_(average)
            average.copy_(parameter_copy)
