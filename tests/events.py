"""Tests wait for events here, and hold what they interrupt, instead of sleeping for a while."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
    from rlkit_engine_torch.fused import FusedDecoder


async def until(condition: Callable[[], object]) -> None:
    """Wait for what another task, thread or process does."""
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, "what is waited for does not come"
        await asyncio.sleep(0.001)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for what another thread or process does."""
    end = time.monotonic() + 200
    while not condition():
        assert time.monotonic() < end, "what is waited for does not come"
        time.sleep(0.005)


def gone(pid: int) -> bool:
    """Whether a process has ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


class Gate:
    """Holds a decode step of the fused decoder until it is opened; remembers the rows and threads of all steps.

    Args:
        monkeypatch: Undoes it.
        step: The number of the step, from 1.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
        from rlkit_engine_torch.fused import FusedDecoder

        self.entered, self.opened = threading.Event(), threading.Event()
        self.rows: list[int] = []
        self.threads: list[str] = []
        plain = FusedDecoder.step

        def held(decoder: FusedDecoder, tokens: torch.Tensor) -> torch.Tensor:
            self.rows.append(decoder.rows)
            self.threads.append(threading.current_thread().name)
            if len(self.rows) == step:
                self.entered.set()
                assert self.opened.wait(60)
            return plain(decoder, tokens)

        monkeypatch.setattr(FusedDecoder, "step", held)
