"""Offload to host memory of what a rollout does not need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class HostOffload:
    """Modules and optimizers that are offloaded to host memory while an engine needs the device.

    Args:
        modules: Sharded or not.
        optimizers: Their state is offloaded.
        device: The one that they are moved back to.
    """

    modules: Sequence[nn.Module]
    optimizers: Sequence[torch.optim.Optimizer]
    device: torch.device
    away: bool = False

    @contextmanager
    def off_device(self) -> Iterator[None]:
        """Offload everything; modules must not be called, nor optimizers stepped, inside this context."""
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
        """Move one of the modules to the device for this context, if it is offloaded."""
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
    """Free device memory that this process holds unused: blocks shared with other processes, then the cache."""
    if device.type == "cuda":
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def use_device(device: torch.device) -> None:
    """Make a GPU the current device of the calling thread; other devices need no such choice."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _move(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    for module in modules:
        module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # AdamW counts steps on the CPU
                    state[key] = value.to(device)
