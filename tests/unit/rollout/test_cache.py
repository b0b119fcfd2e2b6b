"""The cache of renderings: what it keeps, and who waits for whom."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from rlkit.rollout.cache import SizedCache

SECONDS = 60


def test_values_that_were_used_last_are_kept() -> None:
    made: list[str] = []

    def make(key: str) -> str:
        made.append(key)
        return key

    cache: SizedCache[str] = SizedCache(5, len)
    for key in ("aa", "bb", "aa", "cc", "aa", "bb", "eeeeeeee", "eeeeeeee", "aa", "eeeeeeee"):
        assert cache.get(key, lambda key=key: make(key)) == key  # type: ignore[misc]
    assert made == ["aa", "bb", "cc", "bb", "eeeeeeee", "aa", "eeeeeeee"]


def test_an_error_is_not_kept() -> None:
    cache: SizedCache[str] = SizedCache(5, len)
    with pytest.raises(ZeroDivisionError):
        cache.get("a", lambda: str(1 / 0))
    assert cache.get("a", lambda: "made") == "made"


def test_threads_wait_for_their_own_key_alone() -> None:
    """A text that takes long to render holds up no other conversation, and is rendered once."""
    cache: SizedCache[str] = SizedCache(100, len)
    begun, may_end = Event(), Event()

    def slow() -> str:
        begun.set()
        assert may_end.wait(SECONDS)
        return "slow"

    def never() -> str:
        raise AssertionError("made twice")

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(cache.get, "a", slow)
        assert begun.wait(SECONDS)
        second = threads.submit(cache.get, "a", never)
        assert cache.get("b", lambda: "quick") == "quick"
        assert not first.done()
        may_end.set()
        assert (first.result(SECONDS), second.result(SECONDS)) == ("slow", "slow")


def test_a_value_that_left_while_it_was_made_counts_no_more() -> None:
    cache: SizedCache[str] = SizedCache(3, len)

    def displaced() -> str:
        for key in ("b", "c"):
            cache.get(key, lambda: "xx")
        return "aaa"

    assert cache.get("a", displaced) == "aaa"
    made: list[str] = []
    for _ in range(2):
        cache.get("c", lambda: made.append("c") or "xx")
    assert made == []
