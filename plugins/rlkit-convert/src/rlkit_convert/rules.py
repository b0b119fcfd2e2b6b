"""Rules by option: what a peer's option becomes in rlkit, or what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rlkit_convert.values import unchanged


@dataclass(frozen=True)
class Equivalent:
    """The rule of an option that has an equivalent in rlkit.

    Args:
        key: rlkit's key.
        change: Converts the peer's value to rlkit's; raises ValueError if it cannot.
    """

    key: str
    change: Callable[[object], object] = unchanged


@dataclass(frozen=True)
class CombinedRule:
    """The rule of an option that a function reads together with related options."""


@dataclass(frozen=True)
class NoEquivalent:
    """The rule of an option that has no equivalent in rlkit, and does not change what is trained.

    Args:
        remedy: What to do instead, or why nothing needs to be done.
    """

    remedy: str


@dataclass(frozen=True)
class ByHand:
    """The rule of an option that changes the method, the data, the tools or the model, and has no equivalent.

    Args:
        remedy: What to set by hand.
        off: Values with which the option changes nothing; by default false, 0 and empty ones.
    """

    remedy: str
    off: tuple[object, ...] = ()

    def is_off(self, value: object) -> bool:
        """Whether a value changes nothing."""
        return value in self.off if self.off else not value


Rule = Equivalent | CombinedRule | NoEquivalent | ByHand
COMBINED = CombinedRule()


def equivalents(change: Callable[[object], object], keys: Mapping[str, str]) -> dict[str, Rule]:
    """Return the rules of options whose values one function converts, from rlkit's key by the peer's."""
    return {theirs: Equivalent(ours, change) for theirs, ours in keys.items()}


def read_together(names_by_prefix: Mapping[str, str]) -> dict[str, Rule]:
    """Return the rules of options that functions read: by a prefix, names that blanks separate."""
    return {f"{prefix}{name}": COMBINED for prefix, names in names_by_prefix.items() for name in names.split()}


def without_equivalent(remedies: Mapping[str, str]) -> dict[str, Rule]:
    """Return the rules of options without an equivalent, from remedies by the names, which blanks separate."""
    return {name: NoEquivalent(remedy) for names, remedy in remedies.items() for name in names.split()}
