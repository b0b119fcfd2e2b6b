"""Leaving the device while an engine needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class HostOffload:
    """Modules and optimizers that leave the device while an engine needs it.

    Args:
        modules: Sharded or whole.
        optimizers: Whose state leaves.
        device: Where they come back to.
    """

    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    away: bool = False

    @contextmanager
    def off_device(self) -> Iterator[None]:
        """Keep all in host memory for a while; nobody may call the modules or step the optimizers meanwhile."""
        _move(self.modules, self.optimizers, torch.device("cpu"))
        self.away = True
        free_cached(self.device)
        try:
            yield
        finally:
            self.away = False
            _move(self.modules, self.optimizers, self.device)

    @contextmanager
    def back(self, module: nn.Module) -> Iterator[None]:
        """Have one of the modules on the device for a while, wherever it is."""
        if not self.away:
            yield
            return
        module.to(self.device)
        try:
            yield
        finally:
            module.to("cpu")
            free_cached(self.device)


def free_cached(device: torch.device) -> None:
    """Free what this process keeps of a device's memory without using it: what others had opened, then caches."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _move(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    for module in modules:
        module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # AdamW counts steps on the CPU
                    state[key] = value.to(device)
