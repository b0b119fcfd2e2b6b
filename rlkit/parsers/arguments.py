"""Types of arguments in forms that write a string and JSON alike: the tool's schema says what they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from rlkit.interfaces.parser import ToolCall
from rlkit.parsers.text import decode

_NAMES = {"True": True, "False": False, "None": None}
"""How templates that do not write JSON's constants write them."""


def with_types(call: ToolCall, parameters: object) -> ToolCall:
    """Return a call whose arguments are what the tool's JSON schema allows, of all that the policy may have meant.

    That is JSON other than a string, then a string as it was written, then a string of JSON. What the schema does not
    describe, or allows in no form, stays as the parser read it.
    """
    if not call.texts or not isinstance(parameters, Mapping):
        return call
    properties = parameters.get("properties")
    if not isinstance(properties, Mapping):
        return call
    arguments = dict(call.arguments)
    for name, text in call.texts.items():
        if name in properties:
            arguments[name] = next(_allowed(text, parameters, properties[name]), arguments[name])
    return replace(call, arguments=arguments)


def _allowed(text: str, parameters: Mapping[str, object], schema: object) -> Iterator[object]:
    """Yield what a text may mean, the likeliest first, of which the schema of an argument allows it.

    A schema that is none allows nothing: the check of the call says what is wrong with it.
    """
    from jsonschema.validators import validator_for

    values = list(_meanings(text))
    ordered = [value for value in values if not isinstance(value, str)] + [v for v in values if isinstance(v, str)]
    try:
        validator = validator_for(parameters)(parameters).evolve(schema=schema)
        yield from [value for value in ordered if validator.is_valid(value)]
    except Exception:  # a foreign schema may raise anything
        return


def _meanings(text: str) -> Iterator[object]:
    yield text
    if text.strip() in _NAMES:
        yield _NAMES[text.strip()]
    try:
        value, end = decode(text, 0)
    except ValueError:
        return
    if end == len(text):
        yield value
