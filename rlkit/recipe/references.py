"""References of a recipe to its own options, `${section.option}`, in recipe files and on the command line.

A reference has the value of the composed recipe. No environment or file is read, and nothing is computed.
`$${section.option}` is the literal text `${section.option}`; every other `$` is text as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

PATTERN = re.compile(r"(\$?)\$\{((?:oc\.\w+|env):[^{}]*|[a-z_][\w-]*(?:\.[\w-]+)*)\}")
"""What may be a reference, after a `$` if it is literal; OmegaConf's resolvers, which read what is outside, count."""


def has_reference(value: object) -> bool:
    """Whether a value, or something in it, refers to another option."""
    if isinstance(value, str):
        return any(not match[1] and _is_key(match[2]) for match in PATTERN.finditer(value))
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(has_reference, children))


def fill(value: object, value_of: Callable[[str], object]) -> object:
    """Return a value whose references are filled in: one that is a whole text may have any type."""
    if isinstance(value, Mapping):
        return {name: fill(child, value_of) for name, child in value.items()}
    if isinstance(value, list):
        return [fill(child, value_of) for child in value]
    if not isinstance(value, str) or not has_reference(value):
        return value

    def text_of(match: re.Match[str]) -> str:
        return str(value_of(match[2])) if not match[1] and _is_key(match[2]) else match[0]

    reference = PATTERN.fullmatch(value)
    return value_of(reference[2]) if reference else PATTERN.sub(text_of, value)


def without_escapes(text: str) -> str:
    """Return a text in which `$${section.option}` is the literal `${section.option}`."""
    return PATTERN.sub(lambda match: match[0][1:] if match[1] and _is_key(match[2]) else match[0], text)


def _is_key(name: str) -> bool:
    if "." in name or ":" in name:
        return True
    from rlkit.recipe.recipe import Recipe

    return name in Recipe.__dataclass_fields__
