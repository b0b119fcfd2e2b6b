"""A cache of the values that were used last, by their size."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
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
        self._values: OrderedDict[str, Future[V]] = OrderedDict()
        self._total = 0
        self._lock = Lock()

    def get(self, key: str, make: Callable[[], V]) -> V:
        """Return the value of a key; threads that ask for it while it is made wait, those with other keys do not."""
        with self._lock:
            is_new = key not in self._values
            future: Future[V] = self._values.setdefault(key, Future())
            self._values.move_to_end(key)
        if not is_new:
            return future.result()
        try:
            value = make()
        except BaseException as error:  # which is for all that wait, and not kept
            with self._lock:
                self._values.pop(key, None)
            future.set_exception(error)
            raise
        with self._lock:
            future.set_result(value)
            self._total += self._size(value) if self._values.get(key) is future else 0
            while self._total > self._limit and len(self._values) > 1:
                _, oldest = self._values.popitem(last=False)
                self._total -= self._size(oldest.result()) if oldest.done() else 0
        return value
