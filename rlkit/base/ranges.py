"""The ranges of numbers, stated once in their types: help shows them, and values outside are refused.

Another range is `Annotated[int, Ge(4), Le(999), NUMBER]`: bounds on both sides, then `NUMBER`, which refuses true and
false and words the error. NaN, infinities and null are in no range; an option that may be null has
`PositiveFloat | None`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from rlkit.base.names import NameRule

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

LARGEST = 2**31 - 1
LARGEST_FLOAT = 1e30
"""Larger numbers could overflow float32."""
UNSAID = (LARGEST, LARGEST_FLOAT)
"""The widest bounds, which the text of a range leaves out."""
YEAR = 365 * 24 * 3600.0


class _Number:
    """Makes pydantic refuse numbers outside of the range, and other values, with one message: the range."""

    def __repr__(self) -> str:
        return "NUMBER"

    def __get_pydantic_core_schema__(self, source: object, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import PydanticCustomError, ValidationError, core_schema

        schema = handler(source)

        def validate(value: object, number: Callable[[object], object]) -> object:
            complete = False
            try:
                if not isinstance(value, bool):
                    return number(value)
            except ValidationError as error:
                crossed = error.errors(include_url=False)[0].get("ctx", {})
                complete = any(abs(bound) in UNSAID for bound in crossed.values() if isinstance(bound, int | float))
            words = _words(schema["type"], cast(Mapping[str, float], schema), complete)
            raise PydanticCustomError("range", "expected {words}", {"words": words})

        return core_schema.no_info_wrap_validator_function(validate, schema)


NUMBER = _Number()

PositiveInt = Annotated[int, Ge(1), Le(LARGEST), NUMBER]
NonNegativeInt = Annotated[int, Ge(0), Le(LARGEST), NUMBER]
FiniteInt = Annotated[int, Ge(-LARGEST), Le(LARGEST), NUMBER]
PositiveFloat = Annotated[float, Gt(0), Le(LARGEST_FLOAT), NUMBER]
NonNegativeFloat = Annotated[float, Ge(0), Le(LARGEST_FLOAT), NUMBER]
FiniteFloat = Annotated[float, Ge(-LARGEST_FLOAT), Le(LARGEST_FLOAT), NUMBER]
Share = Annotated[float, Ge(0), Le(1), NUMBER]
"""A fraction."""
PositiveShare = Annotated[float, Gt(0), Le(1), NUMBER]
ShareBelowOne = Annotated[float, Gt(0), Lt(1), NUMBER]
Count = Annotated[int, Ge(1), Le(2**16), NUMBER]
"""Number of objects created or run at once."""
Repeats = Annotated[int, Ge(0), Le(1000), NUMBER]
"""Number of repetitions."""
Beta = Annotated[float, Ge(0), Lt(1), NUMBER]
"""A decay of a moving average."""
LearningRate = Annotated[float, Gt(0), Le(1), NUMBER]
"""An optimizer such as AdamW changes a weight by about this much per step."""
Temperature = Annotated[float, Ge(0), Le(100), NUMBER]
Seconds = Annotated[float, Gt(0), Le(YEAR), NUMBER]


def outside(owner: object, key: str = "") -> Iterator[str]:
    """Yield a message for each number outside of its range, and each name that its type refuses, in a Python object.

    These are a section's fields, and what a part keeps under the names of its constructor's arguments; sections and
    parts in them are included. Values in YAML and on the command line are checked when they are converted.
    """
    cls: type = type(owner)
    for name, hint in _hints(cls).items():
        if name not in getattr(owner, "__dict__", ()):
            continue
        value = getattr(owner, name)
        option_key = f"{key}.{name}".lstrip(".")
        key_type = _key_type(hint)
        if key_type is not str:
            for child_name in value if isinstance(value, Mapping) else ():
                words = expected(key_type, child_name)
                if words is not None:
                    yield f"{option_key} has the name {child_name!r}, expected {words}"
        elif is_checked(hint):
            words = expected(hint, value)
            if words is not None:
                yield f"{option_key} is {value!r}, expected {words}"
        for child_key, child in _children(value, option_key):
            yield from outside(child, child_key)


def expected(hint: object, value: object) -> str | None:
    """Return in words what a type allows if it does not allow a value; None if it does."""
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        errors = error.errors()
        refusal = next((e for e in errors if e["type"] == "range"), errors[0])
        return str(refusal["msg"]).removeprefix("expected ")
    return None


def _children(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield the objects in an option that may have options of their own, with their keys."""
    if isinstance(value, Mapping):
        yield from ((f"{key}.{name}", child) for name, child in value.items())
    elif isinstance(value, list):
        yield from ((f"{key}.{index}", child) for index, child in enumerate(value) if hasattr(child, "__dict__"))
    else:
        yield key, value


@cache
def _adapter(hint: Any) -> TypeAdapter[object]:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


@cache
def _hints(cls: type) -> dict[str, object]:
    """Return the types of a class's options."""
    try:
        return get_type_hints(cls.__init__, include_extras=True)  # type: ignore[misc]
    except NameError:  # a type of a plugin that only type checkers import
        return {}


def _key_type(hint: object) -> object:
    """Return the type of the keys of a mapping, alone or in a union; `str` for any other type."""
    for member in (hint, *get_args(hint)):
        origin = get_origin(member)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return get_args(member)[0]
    return str


def is_checked(hint: object) -> bool:
    """Whether a type has a range of numbers or a rule for names in it."""
    rules = getattr(hint, "__metadata__", ())
    return any(isinstance(rule, _Number | NameRule) for rule in rules) or any(map(is_checked, get_args(hint)))


def _words(kind: str, bounds: Mapping[str, float], complete: bool = False) -> str:
    """Return `a number above 0`; the bounds in `UNSAID` are left out, unless the text is to be complete."""
    texts = {
        name: f"{bounds[name]:.10g}"
        for name in ("ge", "gt", "le", "lt")
        if name in bounds and (complete or abs(bounds[name]) not in UNSAID)
    }
    noun = "a whole number" if kind == "int" else "a number"
    if {"ge", "le"} <= set(texts):
        return f"{noun} from {texts['ge']} to {texts['le']}"
    forms = {"ge": "of {} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    limits = " and ".join(forms[name].format(bound) for name, bound in texts.items())
    return f"{noun} {limits}".rstrip()
