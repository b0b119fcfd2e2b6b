"""The state of a conversion: the recipe built up so far, and remarks on what is not carried over."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

from rlkit.base.errors import show
from rlkit_convert.rules import ByHand, CombinedRule, Equivalent, NoEquivalent, Rule
from rlkit_convert.source import PeerOptions

T = TypeVar("T")


NO_RULE = "rlkit convert has no rule for it; see rlkit recipe show grpo_gsm8k for rlkit's options"
OFF = "nothing to do: off, or the peer's default"
SWITCHES = ("enable", "enabled")
"""Names of an option that switches those beside it."""
UNUSED = "nothing to do: it has no effect with the other options, or is rlkit's default"


class Conversion:
    """A recipe built up from a peer's options, with remarks on options that are not carried over.

    Args:
        options: The peer's options.
        defaults: The peer's own defaults that differ from rlkit's.
        rules: The rule of each option; names may be patterns.
    """

    def __init__(
        self, options: PeerOptions, defaults: Mapping[str, object], rules: Mapping[str, Rule] = MappingProxyType({})
    ) -> None:
        self.options = options
        self.defaults = defaults
        self.rules = rules
        self.recipe: dict[str, tuple[object, str]] = {}
        self.notes: dict[str, str] = {}
        self.by_hand: set[str] = set()
        self._left_out: set[str] = set()
        self._carried: set[str] = set()

    def has(self, key: str) -> bool:
        """Check whether an option is set."""
        return key in self.options.values

    def is_unknown(self, *keys: str) -> bool:
        """Check whether one of the options is set to a value that only running something would show."""
        return any(key in self.options.unresolved for key in keys)

    def leave_out(self, key: str) -> None:
        """Keep an option out of the recipe, with the options of the class that it names: its value is unknown."""
        self._left_out.add(key)
        for name in [name for name in self.recipe if self._is_left_out(name)]:
            del self.recipe[name]

    def _is_left_out(self, key: str) -> bool:
        return any(key == name or key.startswith(f"{name}.") for name in self._left_out)

    def get(self, key: str, change: Callable[[object], T], default: T) -> T:
        """Return an option's converted value, or the peer's default, or else `default`."""
        value = self.options.values.get(key, self.defaults.get(key))
        if value is None:
            return default
        try:
            return change(value)
        except ValueError as error:
            self.ask(key, f"{error}; set it in the recipe by hand")
            return default

    def raw(self, key: str, default: object = None) -> object:
        """Return an option's value as the peer's configuration has it."""
        return self.options.values.get(key, default)

    def carry(self, key: str, source: str, change: Callable[[object], object], default: object, *also: str) -> None:
        """Set an option of the recipe to the converted value of a peer's option, as `get` returns it.

        Args:
            key: rlkit's option.
            source: The peer's option.
            change: Converts the peer's value.
            default: The value if neither the option nor the peer's default is set.
            also: Further options of the peer's on which the value depends.
        """
        self.set(key, self.get(source, change, default), source, *also)

    def carry_given(self, key: str, source: str, change: Callable[[object], object], default: object) -> None:
        """Set an option of the recipe as `carry` does, if the peer's option is set."""
        if self.has(source):
            self.carry(key, source, change, default)

    def set(self, key: str, value: object, *sources: str) -> None:
        """Set an option of the recipe, and record the peer's options that it comes from.

        It is left out if one of them has an unknown value.
        """
        if self.is_unknown(*sources):
            self.leave_out(key)
        if self._is_left_out(key):
            self._carried |= set(filter(self.has, sources))
            for name in filter(self.has, sources):
                self.note(name, f"{key} also depends on an option whose value is unknown; set it")
            return
        if not sources:
            self.recipe[key] = (value, "")
            return
        names = [name for name in sources if self.has(name)]
        self._carried |= set(names)
        joined = ", ".join(names)
        previous_sources = self.recipe[key][1] if key in self.recipe else joined
        if previous_sources != joined:
            for name in filter(self.has, previous_sources.split(", ")):
                self.note(name, f"{joined} also sets {key}, and wins")
        self.recipe[key] = (value, joined or f"default of {', '.join(sources)}")

    def carries(self, key: str) -> bool:
        """Check whether an option of the recipe comes from an option."""
        return key in self._carried

    def note(self, key: str, remedy: str) -> None:
        """Record what to do about an option; the first remark counts."""
        self.notes.setdefault(key, remedy)

    def ask(self, key: str, remedy: str) -> None:
        """Record what to set by hand, since what an option changes is not carried over."""
        self.note(key, remedy)
        self.by_hand.add(key)

    def switch_off(self, key: str) -> str | None:
        """Return the option that switches a group of options off to which `key` belongs; None if there is none."""
        group = key
        while "." in group:
            group = group.rpartition(".")[0]
            for name in (f"{group}.{end}" for end in SWITCHES):
                if self.has(name) and name != key and self.raw(name) is False:
                    return name
        return None

    def rule(self, key: str) -> Rule | None:
        """Return the rule of an option; None if there is no rule."""
        if key in self.rules:
            return self.rules[key]
        return next((rule for name, rule in self.rules.items() if "*" in name and fnmatchcase(key, name)), None)

    def apply(self, functions: Iterable[Callable[[Conversion], None]]) -> None:
        """Apply the rules to single options, then the functions to those that belong together."""
        for key, reason in self.options.unresolved.items():
            rule, switch = self.rule(key), self.switch_off(key)
            if switch is not None:
                self.note(key, f"nothing to do: {self.options.name(switch)} is false")
                continue
            remedy = (
                rule.remedy if isinstance(rule, NoEquivalent | ByHand) else "give it after the file, with its value"
            )
            if not isinstance(rule, NoEquivalent):
                self.by_hand.add(key)
            target = ""
            if isinstance(rule, Equivalent):
                self.leave_out(rule.key)
                target = f", or set {rule.key}"
            self.note(key, f"{reason}; {remedy}{target}")
        for key in {**self.options.values, **self.defaults}:
            if key not in self.options.unresolved:
                self._apply_rule(key)
        for function in functions:
            function(self)
        for key, noticed in self.options.remarks.items():
            self.note(key, noticed)
        for key in self.options.values:
            if isinstance(self.rule(key), CombinedRule) and key not in self._carried:
                self.note(key, UNUSED)

    def _apply_rule(self, key: str) -> None:
        rule = self.rule(key)
        if isinstance(rule, Equivalent) and (self.has(key) or rule.key not in self.recipe):
            value = self.options.values.get(key, self.defaults.get(key))
            try:
                self.set(rule.key, rule.change(value), key)
            except ValueError as error:
                self.ask(key, f"{error} for {rule.key}, not {show(value)}")
        elif self.has(key) and not isinstance(rule, Equivalent | CombinedRule):
            self._list(key, rule)

    def _list(self, key: str, rule: NoEquivalent | ByHand | None) -> None:
        """Record what to do about an option without an equivalent."""
        switch = self.switch_off(key)
        if switch is not None:
            self.note(key, f"nothing to do: {self.options.name(switch)} is false")
        elif isinstance(rule, NoEquivalent):
            self.note(key, OFF if self.raw(key) is False else rule.remedy)
        elif rule is None:
            self.ask(key, NO_RULE)
        elif rule.is_off(self.raw(key)):
            self.note(key, OFF)
        else:
            self.ask(key, rule.remedy)
