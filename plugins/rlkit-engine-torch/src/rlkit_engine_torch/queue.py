"""Requests on their way from the event loop to the worker thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from rlkit_engine_torch.batch import Row


@dataclass
class RequestQueue:
    """What the event loop and the worker thread share; the thread looks at it between two decode steps.

    Args:
        waiting: Requests that are not in the batch.
        interrupting: Whether all requests are to end as they are.
        version: The version of the weights.
        wait_idle: Waits until all conversations wait for the engine; None if requests are admitted as they come.
    """

    waiting: deque[Row] = field(default_factory=deque)
    interrupting: bool = False
    version: int = 0
    wait_idle: Callable[[], Awaitable[None]] | None = None

    def sort(self) -> None:
        """Put requests of earlier steps first, so that their order does not depend on time."""
        self.waiting = deque(sorted(self.waiting, key=lambda row: (row.request.key.step, row.request.session)))

    def take_all(self) -> list[Row]:
        """Remove and return all waiting requests."""
        waiting = list(self.waiting)
        self.waiting = deque()
        return waiting
