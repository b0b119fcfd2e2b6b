"""Checks of the fields that a recipe's parts declare and read."""

from __future__ import annotations

from collections.abc import Iterator

from rlkit.base.text import part_name
from rlkit.interfaces.agent import Agent
from rlkit.interfaces.engine import RolloutEngine
from rlkit.interfaces.environment import Environment
from rlkit.interfaces.fields import Field
from rlkit.interfaces.interaction import Interaction
from rlkit.interfaces.reward import RewardManager
from rlkit.interfaces.runtime import RunPart
from rlkit.interfaces.tool import Tool
from rlkit.recipe.recipe import Recipe

FILLED_BY = {
    RewardManager: ("token", "turn", "row"),
    RolloutEngine: ("token",),
    Agent: ("row",),
    Tool: ("turn", "row"),
    Environment: ("turn", "row"),
    Interaction: ("turn", "row"),
}
"""Which values each kind of part knows."""


def check_fields(recipe: Recipe) -> Iterator[str]:
    """Yield a problem for each field that cannot be filled as declared, and for each that is read and never filled."""
    declared: dict[str, tuple[RunPart, Field]] = {}
    for part in recipe.parts() if recipe.method.samples else ():
        kinds = next((by for kind, by in FILLED_BY.items() if isinstance(part, kind)), ())
        for spec in part.fills:
            if not isinstance(spec, Field):
                yield f"{part_name(part)} has {spec!r} in its `fills`, expected rlkit.interfaces.fields.Field"
                continue
            if spec.by not in kinds:
                known = f"values by {' or '.join(kinds)}" if kinds else "no fields"
                yield f"{part_name(part)} declares the field {spec.name!r} by {spec.by}, but such a part fills {known}"
            other, first = declared.setdefault(spec.name, (part, spec))
            if repr(first) != repr(spec):  # NaN differs from itself
                yield f"{part_name(other)} declares {first}, but {part_name(part)} {spec}; rename one of the fields"
    for part in recipe.parts():
        for name in part.reads_fields:
            if name not in declared:
                filled = ", ".join(declared) or "none"
                yield f"{part_name(part)} reads the field {name!r}, which no part of the recipe fills; filled: {filled}"
