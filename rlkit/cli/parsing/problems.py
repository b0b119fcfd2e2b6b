"""The mistakes in a recipe: collected, to be reported at once, without those that follow from others."""

from __future__ import annotations


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
    """A line for each mistake."""

    def __init__(self) -> None:
        super().__init__()
        self._keys: list[str] = []

    def note(self, key: str, problem: str) -> None:
        """Add a problem of an option, unless it follows from one of the section or part around the option."""
        if not any(key.startswith(f"{failed}.") for failed in self._keys):
            self.append(problem)
        self._keys.append(key)

    def concern(self, key: str) -> bool:
        """Whether an option, or one inside of it, has a problem."""
        return any(failed == key or failed.startswith(f"{key}.") for failed in self._keys)
