"""The ranges of numbers, stated once in their types: the command line shows them and refuses what is outside.

Another range is `Annotated[int, Ge(4), Le(999), NUMBER]`: bounds on both sides, then `NUMBER`, which refuses true and
false and words the error. NaN, infinities and null are in no range; an option that may be null has
`PositiveFloat | None`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from functools import cache
from itertools import chain
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from rlkit.names import NameRule

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler, TypeAdapter
    from pydantic_core import CoreSchema

LARGEST = 2**31 - 1
LARGEST_FLOAT = 1e30
"""Larger numbers could overflow float32."""
UNSAID = (LARGEST, LARGEST_FLOAT)
"""Bounds of all numbers, omitted from the text of a range."""
YEAR = 365 * 24 * 3600.0


class _Number:
    """Makes pydantic refuse what is outside of the range, and what is no number, with one message: the range."""

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
            expected = _words(schema["type"], cast(Mapping[str, float], schema), complete)
            raise PydanticCustomError("range", "expected {words}", {"words": expected})

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


def in_words(text: str) -> str:
    """Return the text of a type with its ranges in words: `Annotated[float, Gt(gt=0), ...]` is `number above 0`."""

    def words(found: re.Match[str]) -> str:
        bounds = {name: float(bound) for name, bound in re.findall(r"(\w+)=([^,)]+)", found[2])}
        return _words(found[1], bounds).removeprefix("a ")

    text = re.sub(r"Annotated\[(int|float), ([^\]]*)\]", words, text)
    text = re.sub(r"Annotated\[str, Len\([^)]*\), ([^\]]*)\]", r"\1", text)
    text = re.sub(r"Annotated\[(.+?), USER_ONLY\]", r"\1", text)
    return re.sub(r"Optional\[([^\[\]]*number[^\[\]]*)\]", r"\1 or null", text)


def resolve(cls: type) -> None:
    """Turn annotations that are text into types, in a class's constructor and in the sections that it takes.

    jsonargparse would do it, but its way drops `Annotated`, and the range with it.
    """
    hints = _hints(cls)
    if hints and isinstance(init := _init(cls), FunctionType):
        init.__annotations__ = dict(hints)
    for section in chain.from_iterable((hint, *get_args(hint)) for hint in hints.values()):
        if isinstance(section, type) and is_dataclass(section):
            resolve(section)


def outside(owner: object, key: str = "") -> Iterator[str]:
    """Yield a message for each number outside of its range, and for each name that its type refuses: in a section's
    fields, in what a part keeps under the name of its constructor's argument, and in the sections and parts in these.

    The command line refuses such values before; this is for sections and parts that are made in Python.
    """
    for name, hint in _hints(cast(Hashable, owner.__class__)).items():
        if name not in getattr(owner, "__dict__", ()):
            continue
        value, here = getattr(owner, name), f"{key}.{name}".lstrip(".")
        key_type = key_type_of(hint)
        if key_type is not str:
            names = value if isinstance(value, Mapping) else ()
            yield from (f"{here} has the name {name!r}, expected {words}" for name, words in _wrong(key_type, names))
        elif _is_checked(hint):
            yield from _refusals(hint, value, here)
        for inner_key, part in _parts(value, here):
            yield from outside(part, inner_key)


def _parts(value: object, key: str) -> Iterator[tuple[str, object]]:
    """Yield what an option holds that may have options of its own, with its key."""
    if isinstance(value, Mapping):
        yield from ((f"{key}.{name}", part) for name, part in value.items())
    elif isinstance(value, list):
        yield from ((f"{key}.{index}", part) for index, part in enumerate(value) if hasattr(part, "__dict__"))
    else:
        yield key, value


def expected(hint: object, value: object) -> str | None:
    """Return what a type asks for, in words, where a value is not of it or out of its range; None where it is."""
    from pydantic import ValidationError

    try:
        _adapter(hint).validate_python(value)
    except ValidationError as error:
        wrong = next((e for e in error.errors() if e["type"] == "range"), error.errors()[0])
        return str(wrong["msg"]).removeprefix("expected ")
    return None


def _refusals(hint: object, value: object, key: str) -> Iterator[str]:
    yield from (f"{key} is {value!r}, expected {words}" for value, words in _wrong(hint, [value]))


@cache
def _adapter(hint: Any) -> TypeAdapter[object]:
    from pydantic import TypeAdapter

    return TypeAdapter(hint)


def _init(cls: type) -> object:
    return getattr(cls, "__init__")  # noqa: B009 (mypy refuses the attribute, which a subclass may replace)


@cache
def _hints(cls: Any) -> dict[str, object]:
    """Return the types of a class's options."""
    try:
        return get_type_hints(_init(cls), include_extras=True)
    except NameError:  # a plugin's, imported for type checkers alone
        return {}


def key_type_of(hint: object) -> object:
    """Return the type of the keys of a mapping, alone or beside others, such as null; `str` for any other type."""
    members = [hint, *get_args(hint)]
    mappings = [m for m in members if isinstance(origin := get_origin(m), type) and issubclass(origin, Mapping)]
    return get_args(mappings[0])[0] if mappings else str


def _wrong(hint: object, values: Iterable[object]) -> Iterator[tuple[object, str]]:
    """Yield each value that is not of a type, and what the type asks for."""
    for value in values:
        words = expected(hint, value)
        if words is not None:
            yield value, words


def _is_checked(hint: object) -> bool:
    """Return whether a type has a range of numbers or a rule for names in it."""
    rules = getattr(hint, "__metadata__", ())
    return any(isinstance(rule, _Number | NameRule) for rule in rules) or any(map(_is_checked, get_args(hint)))


def _words(kind: str, bounds: Mapping[str, float], complete: bool = False) -> str:
    """Return `a number above 0`; leave out the bounds of `UNSAID`, unless the text is to be complete."""
    shown = {
        name: f"{bounds[name]:.10g}"
        for name in ("ge", "gt", "le", "lt")
        if name in bounds and (complete or abs(bounds[name]) not in UNSAID)
    }
    noun = "a whole number" if kind == "int" else "a number"
    if {"ge", "le"} <= set(shown):
        return f"{noun} from {shown['ge']} to {shown['le']}"
    forms = {"ge": "of {} or more", "gt": "above {}", "le": "at most {}", "lt": "below {}"}
    limits = " and ".join(forms[name].format(bound) for name, bound in shown.items())
    return f"{noun} {limits}".rstrip()
