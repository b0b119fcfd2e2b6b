"""Functions that block on a device, in a thread of their own."""

from __future__ import annotations

import asyncio

import pytest
import torch
from rlkit_servers.threads import in_daemon_thread


def test_what_a_thread_returns_or_raises_is_its_callers() -> None:
    device = torch.device("cpu")
    assert asyncio.run(in_daemon_thread(device, lambda: 6 * 7)) == 42
    with pytest.raises(ZeroDivisionError):
        asyncio.run(in_daemon_thread(device, lambda: 1 / 0))
