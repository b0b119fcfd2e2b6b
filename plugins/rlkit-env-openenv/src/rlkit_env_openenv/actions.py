"""From a policy's text to an action of a server's schema, and from an observation to text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from typing import Any

from rlkit.base.errors import RecipeError
from rlkit.interfaces.parser import after_thinking
from rlkit.types import JsonObject

ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
INTEGER = re.compile(r"-?[0-9]{1,18}")


class ActionReader:
    """Reads actions from text.

    Args:
        schema: The server's JSON schema of an action.
        field: The field that a text without JSON is; None for the one that the schema requires.

    Raises:
        RecipeError: The schema has no such field.
    """

    def __init__(self, schema: Mapping[str, Any], field: str | None) -> None:
        self.fields: dict[str, Any] = {k: v for k, v in schema.get("properties", {}).items() if k != "metadata"}
        required = [name for name in schema.get("required", []) if name in self.fields]
        names = required or list(self.fields)
        if field is not None and field not in self.fields:
            listed = ", ".join(self.fields) or "none"
            raise RecipeError(f"OpenEnv has action={field!r}, but the server's actions have the fields: {listed}")
        self.field = field if field is not None else names[0] if len(names) == 1 else None
        self.expected = _describe(self.fields[self.field]) if self.field else f"a JSON object with {', '.join(names)}"

    def read(self, text: str) -> JsonObject | None:
        """Return the action that a turn states, None if there is none.

        It is the content of the last `<action>`, else all of the text after the policy's thinking.
        """
        text = after_thinking(text)
        marked = ACTION.findall(text)
        text = (marked[-1] if marked else text).strip()
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        if self.field is None:
            return None
        kind = self.fields[self.field].get("type")
        if kind == "integer":
            return {self.field: int(text)} if INTEGER.fullmatch(text) else None
        if kind == "boolean":
            return {self.field: value} if isinstance(value, bool) else None
        if kind == "number":
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            return {self.field: value} if number else None
        return {self.field: text} if text else None


def _describe(field: Mapping[str, Any]) -> str:
    if "enum" in field:
        return f"one of {', '.join(map(str, field['enum']))}"
    return {"integer": "an integer", "number": "a number", "boolean": "true or false"}.get(
        field.get("type", ""), "text"
    )


def text_of(observation: Mapping[str, Any], field: str | None) -> str:
    """Return an observation as the policy reads it: one field, its only text, or all of it as JSON.

    Raises:
        KeyError: It has no such field.
    """
    fields = {name: value for name, value in observation.items() if name != "metadata" and value is not None}
    if field is not None:
        value = observation[field]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields, ensure_ascii=False)
