"""A cache of the values that were used last, by their size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from threading import Lock
from typing import Generic, TypeVar

V = TypeVar("V")


class SizedCache(Generic[V]):
    """Values by their keys, of which those that were used last are kept, for any thread.

    Args:
        limit: The largest sum of their sizes; the last value is kept whatever its size.
        size: Returns the size of a value.
    """

    def __init__(self, limit: int, size: Callable[[V], int]) -> None:
        self._limit, self._size = limit, size
        self._values: OrderedDict[str, V] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: str, make: Callable[[], V]) -> V:
        """Return the value of a key; other threads wait while it is made."""
        with self._lock:
            if key not in self._values:
                self._values[key] = make()
                self._total += self._size(self._values[key])
            self._values.move_to_end(key)
            while self._total > self._limit and len(self._values) > 1:
                self._total -= self._size(self._values.popitem(last=False)[1])
            return self._values[key]
