"""Cases of options: each with each wrong value, in the file and as an override, and unknown ones beside them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from tests.flow.fuzz.bases import Base, Key, bases
from tests.flow.fuzz.cases import Case
from tests.flow.fuzz.values import VALUES, reason

UNKNOWN = ("nosuch", "dict_kwargs", "class_path", "init_args", "__class__", "Steps", "a.b", "")

OWN_NAMES = (".rewards", "tools", ".weights", ".tasks", ".options", "_kwargs", "sources", ".interactions")
"""Mappings whose keys are the user's own."""


def value_cases() -> Iterator[Case]:
    """Yield each value for each option, in the first base that has the option."""
    for base, option, key, old in _first_of_each():
        for name, new in VALUES.items():
            if new == old and type(new) is type(old):
                continue
            yield Case(
                "value", base.name, f"{option}: {name}", _in_file(base, key, new), reason(option, old, name, False)
            )
            if key[-1] in ("class_path", "init_args") or any(isinstance(part, int) for part in key):
                continue
            flag = ".".join(str(part) for part in key if part != "init_args")
            yield Case(
                "override", base.name, f"{option}: {name}", _override(base, flag, new), reason(option, old, name, True)
            )


def key_cases() -> Iterator[Case]:
    """Yield an unknown key in each section, in the first base that has it."""
    top = [(base, "", (), base.tree) for name, base in bases().items() if "/" not in name]
    for base, option, key, section in [*top, *_first_of_each()]:
        if not isinstance(section, dict) or option.endswith(OWN_NAMES):
            continue
        for name in UNKNOWN:
            if name not in section:
                value = {"nosuch": 1} if name in ("init_args", "dict_kwargs") else 1
                yield Case("key", base.name, f"{option}.{name}", _in_file(base, (*key, name), value))


def _first_of_each() -> Iterator[tuple[Base, str, Key, Any]]:
    """Yield each option once for each type of value that it has in a base, with the base and the key."""
    seen: set[tuple[str, type]] = set()
    for base in bases().values():
        for option, key, value in base.options():
            if value is not None and (option, type(value)) not in seen:
                seen.add((option, type(value)))
                yield base, option, key, value


def _in_file(base: Base, key: Key, value: Any) -> Any:
    return lambda folder: base.write(folder, base.spoiled(key, value))


def _override(base: Base, flag: str, value: Any) -> Any:
    text = value if isinstance(value, str) else _as_yaml(value)
    return lambda folder: [*base.write(folder), f"--{flag}={text}"]


def _as_yaml(value: Any) -> str:
    """Return a value as a recipe writes it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"nan": ".nan", "inf": ".inf", "-inf": "-.inf"}[str(value)]
    return json.dumps(value)
