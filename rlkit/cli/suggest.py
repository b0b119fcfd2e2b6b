"""From a parser's complaint to one message: what was given, what was expected, and the nearest legal thing."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping
from dataclasses import is_dataclass
from functools import reduce
from typing import Any, get_args, get_type_hints

from rlkit.recipe import ROLE_OF_KEY, Recipe
from rlkit.registry import Registry


def explain(complaint: str, parser: Any, registry: Registry) -> str:
    """Rewrite a complaint of jsonargparse; one that is not known here is passed on, its lines joined."""
    text = " ".join(complaint.split())
    return _out_of_range(text) or _explain(text, parser, registry)


def _explain(text: str, parser: Any, registry: Registry) -> str:
    key = _find(r'Parser key "([^"]+)"', text)
    nested = re.search(r"Given value: NestedArg\(key='(\w+)'", text)
    if key and nested and "is not accepted" not in text:  # a value of an optional section
        key, text = f"{key}.{nested[1]}", re.sub(r" - Expected a <class 'NoneType'>.*", "", text)
    if unrecognized := _find(r"unrecognized arguments: (.*)", text):
        given = unrecognized.split()[0].partition("=")[0].lstrip("-")
        if key in ROLE_OF_KEY:
            return _unknown_option(given, key, text, parser, registry)
        return f"unknown option {given!r}; {_nearest(given, known_keys(parser, registry))}"
    if option := _find(r"Option '([^']+)' is not accepted", text):
        return _unknown_option(option, key, text, parser, registry)
    if group := re.search(r"Group '([^']+)' does not accept option '([^']+)'", text):
        return _unknown_option(group[2], group[1], text, parser, registry)
    if key in ROLE_OF_KEY and (name := _find(r"Expected a dot import path string: (\S+)", text)):
        return _unknown_class(key, name, registry)
    if path := _find(r"Import path (\S+) does not correspond to a subclass", text):
        return _unknown_class(key or "?", path, registry)
    if path := _find(r"Importing '([^']+)' is not allowed", text):
        return (
            f"{key or 'the recipe'} names {path!r}, which a recipe may not import; it may name classes of "
            f"{', '.join(registry.packages)} (install a plugin to add more)"
        )
    if required := _find(r"arguments are required: (.*)", text):
        return f"the recipe has no {required}; add it to the recipe or give --{required.split(',')[0]}"
    if (found := re.search(r"Expected an? (.+?)\.? Got value: (.+)$", text)) and key:
        inside = [k for k in re.findall(r'Parser key "([^"]+)"', text)[1:] if not key.endswith(k)]
        key = ".".join([key, *inside])
        return f"{key} is {found[2]!r}, expected {_plain_type(found[1])}"
    if (value := _find(r"Given value: (.+)$", text)) and key and (inside := _keys_under(key, parser, registry)):
        return f"{key} is {value!r}, expected null or a section with: {', '.join(inside)}"
    if (choice := re.search(r"Expected an? (typing\.Literal.+?\]|<class '[^']+'>).*Given value: (.+)$", text)) and key:
        null = " or null" if "NoneType" in text else ""
        return f"{key} is {choice[2]!r}, expected {_plain_type(choice[1])}{null}"
    return text


def _out_of_range(text: str) -> str | None:
    """Explain a number outside of the range that its type states (see `rlkit.ranges`)."""
    found = re.search(r"(expected a [^\[]+?) \[type=range, input_value=(.*?), input_type=\w+\]", text)
    if found is None:
        return None
    before, after = text[: found.start()], text[found.end() :]
    keys = re.findall(r'Parser key "([^"]+)"', before)
    if (nested := re.search(r"Given value: NestedArg\(key='([^']+)'", after)) and len(keys) == 1:
        keys.append(nested[1])
    key = reduce(lambda outer, inner: inner if inner.startswith(f"{outer}.") else f"{outer}.{inner}", keys)
    value = _find(r"^\. Got value: (.*?)(?: - Expected| Given value|$)", after) or found[2].strip("'")
    null = ", or null" if after.startswith(" - Expected a <class 'NoneType'>") else ""
    return f"{key} is {_shown(value)}, {found[1]}{null}"


YAML = {"None": "null", "True": "true", "False": "false"}


def _shown(value: str) -> str:
    """Return a value as a message shows it: numbers bare, other texts in quotes, and not all of a long one."""
    bare = re.fullmatch(r"[-+]?(\.?\d[\d.e+-]*|\.?inf|\.?nan)|[\[{(].*", value, re.IGNORECASE)
    text = YAML.get(value, value if bare else repr(value))
    return text if len(text) <= 80 else f"{text[:60]}... ({len(value)} characters)"


def known_keys(parser: Any, registry: Registry) -> list[str]:
    """Give every key that a recipe may have, the options of every known class included."""
    keys = [action.dest for action in parser._actions if not action.dest.endswith(("help", "recipe"))]
    keys += _keys(get_type_hints(Recipe))
    for section, role in ROLE_OF_KEY.items():
        for part in registry.parts[role].values():
            keys += [f"{section}.{name}" for name in _options(part.cls)]
    return sorted(set(keys))


def _options(cls: Any) -> list[str]:
    """Give the options of a class, those of its sections included."""
    try:
        hints = get_type_hints(cls.__init__)
    except NameError:  # a plugin's, imported for type checkers alone
        hints = {}
    return _keys({name: hints.get(name) for name in inspect.signature(cls).parameters})


def _keys_under(key: str, parser: Any, registry: Registry) -> list[str]:
    return [k.removeprefix(f"{key}.") for k in known_keys(parser, registry) if k.startswith(f"{key}.")]


def _keys(hints: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Give the names of annotated options, with those in sections among them, the optional ones included."""
    keys = []
    for name, hint in hints.items():
        keys.append(f"{prefix}{name}")
        for inner in (hint, *get_args(hint)):
            if is_dataclass(inner) and isinstance(inner, type):
                keys += _keys(get_type_hints(inner), f"{prefix}{name}.")
    return keys


def _unknown_option(option: str, key: str | None, text: str, parser: Any, registry: Registry) -> str:
    """Explain an option that a section, or the class chosen for a section, does not have."""
    class_name = (_find(r"class_path '([^']+)'", text) or "").rpartition(".")[2]
    if class_name and key in ROLE_OF_KEY:
        part = registry.parts[ROLE_OF_KEY[key]].get(class_name)
        known = _options(part.cls) if part else []
        return f"{key} {class_name} has no option {option!r}; {_nearest(option, known)}"
    whole = option if key is None or option.startswith(f"{key}.") else f"{key}.{option}"
    return f"unknown key {whole!r}; {_nearest(whole, known_keys(parser, registry))}"


def _unknown_class(key: str, name: str, registry: Registry) -> str:
    role = ROLE_OF_KEY.get(key)
    if role is None:
        return f"{key} is {name!r}, which is no class that it may name"
    for other, parts in registry.parts.items():
        if name in parts and other != role:
            return f"{key} is {name!r}, which is one of the {other}; {_nearest(name, list(registry.parts[role]))}"
    return f"{key} is {name!r}, which no plugin offers; {_nearest(name, list(registry.parts[role]))}"


def _nearest(given: str, known: list[str]) -> str:
    near = difflib.get_close_matches(given, known, 1, 0.5)
    if not near:  # the right name in the wrong section
        near = [k for k in known if k.rpartition(".")[2] == given.rpartition(".")[2]][:1]
    same_section = [k for k in known if k.startswith(given.partition(".")[0] + ".")] or known
    listed = ", ".join(same_section[:12])
    return f"did you mean {near[0]!r}?" if near else f"known: {listed}"


def _plain_type(text: str) -> str:
    if choices := _find(r"Literal\[(.*)\]", text):
        return f"one of {choices.replace(chr(39), '')}"
    return re.sub(r"<class '(?:builtins\.)?([^']+)'>", r"\1", text)


def _find(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match[1] if match else None
