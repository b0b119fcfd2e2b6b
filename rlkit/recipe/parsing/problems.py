"""Mistakes in recipes, each with the file and the line of the option."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping


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
    """A line for each mistake, with its location in a recipe file if it has one.

    `sources` are what was composed, in this order: each returns the locations of its options by their keys, none for
    those of the command line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Callable[[], Mapping[str, str]]] = []
        self._set_by: dict[str, int] = {}
        self._keys: list[str] = []

    def set_by_last(self, key: str) -> None:
        """Note that the last source sets an option."""
        self._set_by[key] = len(self.sources) - 1

    def replaced(self, key: str) -> None:
        """Forget which sources have set what was inside of an option."""
        self._set_by = {k: source for k, source in self._set_by.items() if not k.startswith(f"{key}.")}

    def note(self, key: str, problem: str) -> None:
        """Add a problem of an option, unless it follows from one of the section or part around the option."""
        if not any(key.startswith(f"{failed}.") for failed in self._keys):
            self.append(problem + self.location(key))
        self._keys.append(key)

    def location(self, key: str) -> str:
        """Return the file and the line of an option, or of what is around it; nothing for one of the command line."""
        setter = _nearest(key, self._set_by)
        locations = {} if setter is None else self.sources[self._set_by[setter]]()
        above = _nearest(key, locations)
        return "" if above is None else f" ({locations[above]})"

    def concern(self, key: str) -> bool:
        """Whether an option, or one inside of it, has a problem."""
        return any(failed == key or failed.startswith(f"{key}.") for failed in self._keys)


def _nearest(key: str, keys: Iterable[str]) -> str | None:
    """Return the longest of the keys that is an option, or around it."""
    return max((k for k in keys if f"{key}.".startswith(f"{k}.")), key=len, default=None)
