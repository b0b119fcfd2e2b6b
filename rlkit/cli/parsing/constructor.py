"""Checks of the constructors of plugins' parts, whose signatures are the schema of their options."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING

from rlkit.base.errors import with_definition
from rlkit.base.ranges import expected, is_checked
from rlkit.base.text import part_name
from rlkit.cli.parsing.problems import Mistake
from rlkit.cli.parsing.schema import options
from rlkit.registry import Part


def check_constructor(key: str, part: Part, set_options: Collection[str]) -> None:
    """Check a part's arguments, and the defaults of those that are not given.

    Raises:
        Mistake: A required argument has no type, or a default is out of its range.
    """
    for name, option in options(part.cls).items():
        if option.required and option.untyped_in is not None:
            raise Mistake(key, f"{key} cannot be {part.name}: {without_type(name, option.untyped_in)}")
        if name in set_options or option.default is MISSING or not is_checked(option.hint):
            continue
        words = expected(option.hint, option.default)
        if words is not None:
            problem = (
                f"the default of {name!r} of {part_name(part.cls)} is {option.default!r}, expected {words}; change it"
            )
            raise Mistake(key, with_definition(problem, part.cls, "__init__"))


def without_type(name: str, cls: type) -> str:
    """Return the message about an argument of a class that has no type."""
    problem = f"the argument {name!r} of {part_name(cls)} has no type; annotate it"
    return with_definition(problem, cls, "__init__")
