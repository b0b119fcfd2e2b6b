"""How a peer's options become rlkit's: rules by name, and what a conversion has found so far."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

from rlkit.cli.convert.source import LARGEST, Given
from rlkit.errors import show

T = TypeVar("T")


def same(value: object) -> object:
    """Return a value as it is."""
    return value


def number(value: object) -> float:
    """Return a number; one in a text is read.

    Raises:
        ValueError: It is none.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError("expected a number")
    return value


def whole(value: object) -> int:
    """Return an integer.

    Raises:
        ValueError: It is none.
    """
    if (found := number(value)) != int(found):
        raise ValueError("expected an integer")
    return int(found)


def unlimited(*values: float) -> Callable[[object], float]:
    """Return what takes only the values at which sampling keeps every token."""

    def keep(value: object) -> float:
        if number(value) not in values:
            raise ValueError(
                f"training samples from all tokens, so that the trainer's log-probs are those of what was sampled; "
                f"validation.sampling may be limited; expected {values[0]:g}"
            )
        return values[0]

    return keep


def flag(value: object) -> bool:
    """Return a switch.

    Raises:
        ValueError: It is none.
    """
    if str(value).lower() not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError("expected true or false")
    return str(value).lower() in ("true", "1", "yes")


def text(value: object) -> str:
    """Return a text.

    Raises:
        ValueError: It is a list or a mapping.
    """
    if isinstance(value, list | Mapping):
        raise ValueError("expected a text")
    return str(value)


def one_of(names: Mapping[str, T]) -> Callable[[object], T]:
    """Return what looks a value up among those that have an equivalent."""

    def find(value: object) -> T:
        if str(value) not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return names[str(value)]

    return find


@dataclass(frozen=True)
class To:
    """An option that one of rlkit's stands for.

    Args:
        key: rlkit's key.
        change: Returns rlkit's value for the peer's; raises ValueError where there is none.
    """

    key: str
    change: Callable[[object], object] = same


@dataclass(frozen=True)
class Read:
    """An option that a function reads together with others."""


@dataclass(frozen=True)
class Without:
    """An option that no option of rlkit stands for.

    Args:
        remedy: What to do instead, or why nothing is to be done.
    """

    remedy: str


Rule = To | Read | Without
READ = Read()
UNKNOWN = "rlkit convert has no rule for it; see rlkit recipe show grpo_gsm8k for rlkit's options"

UNUSED = "nothing to do: it has no effect with the other options, or is rlkit's default"


class Conversion:
    """A conversion in the making.

    Args:
        given: The peer's options.
        defaults: The peer's own defaults that differ from rlkit's.
        rules: What becomes of each option; names may be patterns.
    """

    def __init__(
        self, given: Given, defaults: Mapping[str, object], rules: Mapping[str, Rule] = MappingProxyType({})
    ) -> None:
        self.given = given
        self.defaults = defaults
        self.rules = rules
        self.recipe: dict[str, tuple[object, str]] = {}
        self.notes: dict[str, str] = {}
        self._carried: set[str] = set()

    def has(self, key: str) -> bool:
        """Whether an option is given."""
        return key in self.given.values

    def get(self, key: str, change: Callable[[object], T], default: T) -> T:
        """Return an option's value, the peer's default where it is not given, or else `default`."""
        value = self.given.values.get(key, self.defaults.get(key))
        if value is None:
            return default
        try:
            return change(value)
        except ValueError as error:
            self.note(key, f"{error}; set it in the recipe by hand")
            return default

    def set(self, key: str, value: object, *sources: str) -> None:
        """Set an option of the recipe, with the peer's options that it comes from."""
        if not sources:
            self.recipe[key] = (value, "")
            return
        names = [name for name in sources if self.has(name)]
        self._carried |= set(names)
        if (before := self.recipe.get(key)) is not None and before[1] != ", ".join(names):
            for name in filter(self.has, before[1].split(", ")):
                self.note(name, f"{', '.join(names)} sets {key}, too, and wins")
        self.recipe[key] = (value, ", ".join(names) if names else f"default of {', '.join(sources)}")

    def carries(self, key: str) -> bool:
        """Whether an option of the recipe comes from an option."""
        return key in self._carried

    def note(self, key: str, remedy: str) -> None:
        """List an option, with what to do about it."""
        self.notes.setdefault(key, remedy)

    def rule(self, key: str) -> Rule | None:
        """Return the rule of an option; None if there is none."""
        if key in self.rules:
            return self.rules[key]
        return next((rule for name, rule in self.rules.items() if "*" in name and fnmatchcase(key, name)), None)

    def apply(self, functions: Iterable[Callable[[Conversion], None]]) -> None:
        """Carry over what has a rule, list the rest, and let functions read what belongs together."""
        for key, reason in self.given.unknown.items():
            rule = self.rule(key)
            remedy = rule.remedy if isinstance(rule, Without) else "give it after the file, with its value"
            self.note(key, f"{reason}; {remedy}")
        names = [*self.given.values, *(name for name in self.defaults if name not in self.given.values)]
        for key in names:
            rule = self.rule(key)
            value = self.given.values.get(key, self.defaults.get(key))
            if isinstance(rule, To) and (self.has(key) or rule.key not in self.recipe):
                self._carry(key, value, rule)
            elif isinstance(rule, Without) and self.has(key):
                self.note(key, rule.remedy)
            elif rule is None and self.has(key):
                self.note(key, UNKNOWN)
        for function in functions:
            function(self)
        for key in self.given.values:
            if isinstance(self.rule(key), Read) and key not in self._carried:
                self.note(key, UNUSED)

    def _carry(self, key: str, value: object, rule: To) -> None:
        try:
            self.set(rule.key, rule.change(value), key)
        except ValueError as error:
            self.note(key, f"{error} for {rule.key}, not {show(value)}")
