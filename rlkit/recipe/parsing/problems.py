"""Mistakes in recipes, each with the file and the line of the option."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Mistake(Exception):
    """A value that an option does not take.

    Args:
        key: The dotted key of the option.
        problem: What is wrong, and what to do.
    """

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(problem)
        self.key = key
        self.problem = problem


class Problems(list[str]):
    """A line for each mistake, with its place in a recipe file if it has one.

    `sources` are what was composed, in this order: each returns the places of its options by their keys, which are
    empty for those of the command line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Callable[[], Mapping[str, str]]] = []
        self._keys: list[str] = []

    def note(self, key: str, problem: str) -> None:
        """Add a problem of an option, unless it follows from one of the section or part around the option."""
        if not any(key.startswith(f"{failed}.") for failed in self._keys):
            self.append(problem + self.location(key))
        self._keys.append(key)

    def location(self, key: str) -> str:
        """Return the file and the line of an option, or of what is around it; nothing for one of the command line."""
        nearest_key, nearest = "", ""
        for source in self.sources:
            places = source()
            above = max((k for k in places if f"{key}.".startswith(f"{k}.")), key=len, default=None)
            if above is not None and (not places[above] or len(above) >= len(nearest_key)):
                nearest_key, nearest = above, places[above]
        return f" ({nearest})" if nearest else ""

    def concern(self, key: str) -> bool:
        """Whether an option, or one inside of it, has a problem."""
        return any(failed == key or failed.startswith(f"{key}.") for failed in self._keys)
