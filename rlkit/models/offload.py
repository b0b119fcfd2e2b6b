"""Leaving the device while an engine needs it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def off_device(
    modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device
) -> Iterator[None]:
    """Keep modules and the state of optimizers in host memory for a while.

    Args:
        modules: Sharded or whole; nobody may call them meanwhile.
        optimizers: Nobody may step them meanwhile.
        device: Where they come back to.
    """
    _move(modules, optimizers, torch.device("cpu"))
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        yield
    finally:
        _move(modules, optimizers, device)


def _move(modules: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer], device: torch.device) -> None:
    for module in modules:
        module.to(device)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # AdamW counts steps on the CPU
                    state[key] = value.to(device)
