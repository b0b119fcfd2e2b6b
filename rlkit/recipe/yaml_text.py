"""YAML that others may have written: plain data, whose aliases do not expand to more than fits in memory."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import yaml

from rlkit.base.errors import show

MAX_BYTES = 1 << 20
"""Of a recipe's file."""
MAX_DEPTH, MAX_NODES = 20, 20_000
"""Limits of a text with aliases, and of any recipe: its depth, and its nodes with every alias expanded."""
PREFIX = "tag:yaml.org,2002:"
TAG = re.compile(rf"!|{re.escape(PREFIX)}(str|int|float|bool|null|map|seq)")
EXPECTED = {"int": "a whole number of at most 4,300 digits", "float": "a number", "bool": "true or false"}
MISREAD = re.compile(r"[-+]?0[0-7_]+|.*:.*")
"""Numbers in YAML that are not decimal: octal ones, and those in minutes and seconds."""


def load_yaml(text: str) -> object:
    """Return the data in the text of a run's recipe; one that has aliases is checked first.

    Raises:
        ValueError: Its aliases expand to too much.
        YAMLError: It is not YAML.
        RecursionError: It is nested too deeply.
    """
    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, Loader=yaml.SafeLoader)):
        check_yaml(text)
    return yaml.safe_load(text)


def load(text: str) -> object:
    """Return the plain data in a YAML text in which surprises are refused: numbers may be written `1e-4`.

    Raises:
        ValueError: The text is not YAML, has a tag, a repeated key or a cyclic alias, or exceeds the limits.
    """
    from jsonargparse import get_loader

    try:
        check_yaml(text)
        return get_loader("yaml")(text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ValueError(f"line {line}: unacceptable character #x{error.character:04x}") from error
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split()).replace(' in "<unicode string>", line', ", line")
        raise ValueError(problem + ("; indent with spaces" if "'\\t'" in problem else "")) from error
    except TypeError as error:  # jsonargparse adds a colon to the only key of a mapping without a value
        raise ValueError("its only key is not text, expected the name of an option") from error


@dataclass
class _Open:
    """A list or mapping that is being read."""

    anchor: str | None
    mapping: bool
    keys: set[str] = field(default_factory=set)
    children: int = 0
    size: int = 1


def check_yaml(text: str) -> None:
    """Refuse what would surprise a reader, before anything is built.

    This is: tags, repeated keys and keys that are no text, numbers that are huge or not decimal, cyclic aliases and
    exponential expansion.

    Raises:
        ValueError: The text has one of these.
        YAMLError: It is not YAML.
    """
    stack = [_Open(None, mapping=False, size=0)]
    sizes: dict[str, int] = {}
    for event in _events(text):
        anchor, tag = getattr(event, "anchor", None), getattr(event, "tag", None)
        line = (event.start_mark.line if event.start_mark else 0) + 1
        parent = stack[-1]
        is_key = parent.mapping and parent.children % 2 == 0
        parent.children += isinstance(event, yaml.NodeEvent)
        if tag is not None and not TAG.fullmatch(tag):
            raise ValueError(f"line {line} has the tag {tag!r}, expected plain data")
        if isinstance(event, yaml.CollectionStartEvent):
            stack.append(_Open(anchor, isinstance(event, yaml.MappingStartEvent)))
        elif isinstance(event, yaml.CollectionEndEvent):
            closed = stack.pop()
            stack[-1].size += closed.size
            if closed.anchor is not None:
                sizes[closed.anchor] = closed.size
        elif isinstance(event, yaml.AliasEvent):
            if any(node.anchor == anchor for node in stack):
                raise ValueError(f"line {line} has *{anchor} inside of &{anchor} itself")
            parent.size += sizes.get(str(anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            _check_scalar(event, line, is_key)
            if is_key and event.value in parent.keys and event.value != "<<":
                raise ValueError(f"line {line} has the key {event.value!r} a second time")
            if is_key:
                parent.keys.add(event.value)
            parent.size += 1
        if len(stack) - 1 > MAX_DEPTH or stack[-1].size > MAX_NODES:
            problem = f"it is nested more than {MAX_DEPTH} deep, or has more than {MAX_NODES:,} nodes"
            raise ValueError(f"line {line}: {problem}")


def _events(text: str) -> Iterator[yaml.Event]:
    loader = yaml.SafeLoader(text)
    try:
        while loader.check_event():  # type: ignore[no-untyped-call]
            yield loader.get_event()  # type: ignore[no-untyped-call]
    except (ValueError, OverflowError) as error:
        raise ValueError(f"line {loader.line + 1}: the code after \\U is no character") from error


def _check_scalar(event: yaml.ScalarEvent, line: int, is_key: bool) -> None:
    """Refuse a scalar that is not what its tag says, or not what it looks like."""
    constructor, text = yaml.constructor.SafeConstructor(), event.value
    resolved = yaml.resolver.Resolver().resolve(yaml.ScalarNode, text, (event.implicit[0], False))  # type: ignore[no-untyped-call]
    kind = str(event.tag or resolved).removeprefix(PREFIX)
    if is_key and kind in ("null", "bool", "float"):
        raise ValueError(f"line {line} has the key {show(text)[1:-1]}, which is no text: write {show(text)}")
    if kind not in EXPECTED:
        return
    try:
        value = str(getattr(constructor, f"construct_yaml_{kind}")(yaml.ScalarNode(kind, text)))
    except (ValueError, OverflowError, KeyError, IndexError) as error:
        raise ValueError(f"line {line} has {show(text, 80)}, expected {EXPECTED[kind]}") from error
    if MISREAD.fullmatch(text):
        raise ValueError(
            f"line {line} has {show(text, 80)}, which YAML reads as {value}; write that, or quote the text"
        )
