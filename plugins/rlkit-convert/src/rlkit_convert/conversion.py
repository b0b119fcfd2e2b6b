"""How a peer's options become rlkit's: converters of values, rules by option, and the state of a conversion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import TypeVar

from rlkit.base.errors import show
from rlkit.recipe.checks import MOST_CANDIDATES
from rlkit_convert.source import LARGEST, PeerOptions

T = TypeVar("T")


def unchanged(value: object) -> object:
    """Return a value as it is."""
    return value


def number(value: object) -> float:
    """Return a number, which may be written as text.

    Raises:
        ValueError: The value is not a number.
    """
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            value = None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= LARGEST:
        raise ValueError("expected a number")
    return value


def number_or_text(value: object) -> object:
    """Return a number, which may be written as text; any other value as it is."""
    try:
        return number(value)
    except ValueError:
        return value


def integer(value: object) -> int:
    """Return an integer.

    Raises:
        ValueError: The value is not an integer.
    """
    converted = number(value)
    if converted != int(converted):
        raise ValueError("expected an integer")
    return int(converted)


def boolean(value: object) -> bool:
    """Return a switch as a boolean.

    Raises:
        ValueError: The value is not a switch.
    """
    word = str(value).lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError("expected true or false")
    return word in ("true", "1", "yes")


def text(value: object) -> str:
    """Return a value as text.

    Raises:
        ValueError: The value is a list or a mapping.
    """
    if isinstance(value, list | Mapping):
        raise ValueError("expected a text")
    return str(value)


def choice(names: Mapping[str, T]) -> Callable[[object], T]:
    """Return a converter from a peer's names to their equivalents."""

    def convert(value: object) -> T:
        if str(value) not in names:
            raise ValueError(f"expected one of {', '.join(names)}")
        return names[str(value)]

    return convert


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


def read_together(names: str, prefix: str = "") -> dict[str, Rule]:
    """Return the rules of options that functions read, from their names, which blanks separate."""
    return {f"{prefix}{name}": COMBINED for name in names.split()}


def without_equivalent(remedies: Mapping[str, str]) -> dict[str, Rule]:
    """Return the rules of options without an equivalent, from remedies by the names, which blanks separate."""
    return {name: NoEquivalent(remedy) for names, remedy in remedies.items() for name in names.split()}


NO_RULE = "rlkit convert has no rule for it; see rlkit recipe show grpo_gsm8k for rlkit's options"
NO_LOGGER = "{!r} is not a logger of rlkit's; expected Wandb, TensorBoard, MLflow, CSV, or one from a plugin"
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


def loggers(
    conversion: Conversion, key: str, classes: Mapping[str, tuple[str, str]], project: tuple[str, str], run_name: str
) -> None:
    """Set the loggers; metrics.jsonl and the terminal are always written.

    Args:
        conversion: The conversion to add to.
        key: The peer's option that lists loggers.
        classes: rlkit's class and its option of the project by the peer's name; both may be empty.
        project: The peer's option of the project, and its default.
        run_name: The peer's option of the run's name.
    """
    project_key, default = project
    targets = conversion.raw(key, [])
    parts = []
    for target in targets if isinstance(targets, list) else [targets]:
        logger, project_option = classes.get(str(target), (None, ""))
        options: dict[str, str | None] = {}
        if project_option and not conversion.is_unknown(project_key):
            options[project_option] = conversion.get(project_key, text, default)
        if project_option and not conversion.is_unknown(run_name):
            options["name"] = conversion.get(run_name, text, "") or None
        if logger is None:
            conversion.note(key, NO_LOGGER.format(target))
        elif logger:
            parts.append({"class_path": logger, "init_args": options})
    if parts:
        names = [name for name in (project_key, run_name) if not conversion.is_unknown(name)]
        conversion.set("log.loggers", parts, key, *names)


def truncation(conversion: Conversion, prefix: str = "") -> None:
    """Set which tokens training may sample; rlkit needs `top_k` beside `top_p` and `min_p`.

    Args:
        conversion: The conversion to add to.
        prefix: Of the peer's names.
    """
    keys = {name: f"{prefix}{name}" for name in ("top_p", "top_k", "min_p")}
    top_p, min_p = conversion.get(keys["top_p"], number, 1.0), conversion.get(keys["min_p"], number, 0.0)
    top_k = max(conversion.get(keys["top_k"], integer, 0), 0)
    for name, value in (("top_p", top_p), ("min_p", min_p)):
        if conversion.has(keys[name]):
            conversion.set(f"rollout.sampling.{name}", value, keys[name])
    needed = top_p < 1 or min_p > 0
    if conversion.has(keys["top_k"]) or needed:
        limit = min(top_k or (MOST_CANDIDATES if needed else 0), MOST_CANDIDATES)
        conversion.set("rollout.sampling.top_k", limit, *keys.values())
        if limit != top_k:
            source = next(key for key in keys.values() if conversion.has(key))
            conversion.note(source, f"training keeps at most the {limit} likeliest tokens: rollout.sampling.top_k")
