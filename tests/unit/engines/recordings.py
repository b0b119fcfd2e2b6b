"""Recordings of steps without a GPU: functions that are run again, and write to the memory of their first result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Run = Callable[[], Tensor]


def record(run: Run, before: Any) -> Run:
    """Return what `Graph` does, but that its kernels are launched from Python."""
    outputs: list[Tensor] = []

    def replay() -> Tensor:
        output = run()
        if not outputs:
            outputs.append(output.clone())
        return outputs[0].copy_(output)

    return replay
