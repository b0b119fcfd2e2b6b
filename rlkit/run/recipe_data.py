"""The recipe of a run folder as data, for what reads it without its classes."""

from __future__ import annotations

import json
from functools import lru_cache

import yaml

from rlkit.types import JsonObject


def flat(section: object, prefix: str = "") -> dict[str, object]:
    """Return the values of a recipe by dotted keys, without those that are null."""
    if not isinstance(section, dict):
        return {} if section is None else {prefix: section}
    return {k: v for name, part in section.items() for k, v in flat(part, f"{prefix}.{name}".lstrip(".")).items()}


def as_data(recipe_yaml: str) -> JsonObject:
    """Return a recipe as plain JSON data: without YAML aliases, which may expand to more than fits in memory."""
    content: JsonObject = json.loads(_as_json(recipe_yaml), parse_constant=str)
    return content


@lru_cache(maxsize=2)
def _as_json(recipe_yaml: str) -> str:
    """Return a recipe as JSON; PyYAML takes 40 ms, and a run asks three times."""
    return json.dumps(yaml.safe_load(recipe_yaml), default=str)
