"""A peer's options, read as text from a YAML file or a command line. Nothing is run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlkit.base.errors import RecipeError, shorten
from rlkit.recipe.yaml_text import MAX_BYTES, load

REFERENCE = re.compile(r"\$\{(?:oc\.select:)?(\.*[\w.]+)(?:,(.*))?\}", re.DOTALL)
"""A reference to another option of a YAML file, and the default if that option is not set."""
MAX_REFERENCES = 8
"""References that are followed to a value, each to the next."""
LARGEST = 10**15
"""The largest number that an option may be; excludes infinity and NaN."""
MARK = "\ue000"
"""Is around the code of a text whose value is unknown without running something."""


@dataclass
class PeerOptions:
    """A peer's options by name, and the reason for each option whose value is unknown.

    Args:
        values: Options of which the value is certain.
        unresolved: The reason for each other one.
        names: The name in the file, where the rules have that of another version.
        remarks: What the reader noticed about a value.
    """

    values: dict[str, object] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    remarks: dict[str, str] = field(default_factory=dict)

    def has(self, key: str) -> bool:
        """Check whether an option is set, perhaps to an unknown value."""
        return key in self.values or key in self.unresolved

    def name(self, key: str) -> str:
        """Return the name that an option has in the file."""
        return self.names.get(key, key)

    def rename(self, key: str, names: Mapping[str, str]) -> str:
        """Return the name that the rules have, from a table of other versions' names; remember the one in the file."""
        if key in names:
            self.names[names[key]] = key
        return names.get(key, key)

    def add(self, key: str, text: str) -> None:
        """Set an option from the text on a command line; the last one counts, and null unsets it."""
        self.values.pop(key, None)
        self.unresolved.pop(key, None)
        if MARK in text or "$(" in text or "${" in text:
            self.unresolved[key] = f"its value is `{shorten(unmarked(text), 300)}`, which is not run"
        else:
            value = parse_text(text)
            if value is not None:
                self.values[key] = value


def marked(text: str) -> str:
    """Return a text that a shell would replace as one that has no meaning to it."""
    return f"{MARK}{text.encode().hex()}{MARK}"


def unmarked(text: str) -> str:
    """Return a text with what `marked` has made as it stood."""
    return re.sub(f"{MARK}([0-9a-f]*){MARK}", lambda match: unmarked(bytes.fromhex(match[1]).decode()), text)


def parse_text(text: str) -> object:
    """Return the value that a text of a command line represents, or the text itself."""
    if text == "None":
        return None
    try:
        return load(text) if text else ""
    except ValueError:
        return text


def read_text(name: str) -> str:
    """Return the text of a file.

    Raises:
        RecipeError: The file cannot be read, is too large for a configuration, or is not plain text.
    """
    try:
        path = Path(name)
        if not os.path.isfile(path):
            raise RecipeError(f"{shorten(name, 200)!r} is not a file, expected a YAML file or a shell script")
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise RecipeError(f"{name} has {size:,} bytes, expected a configuration of at most {MAX_BYTES:,}")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name, bytes that are not UTF-8
        raise RecipeError(f"{shorten(name, 200)!r} is not UTF-8 text: {error}") from error
    if "\0" in text or MARK in text:
        raise RecipeError(f"{name} contains NUL or U+E000, expected plain text")
    return text


def read_yaml(text: str, name: str, nested: bool) -> PeerOptions:
    """Return the options in a YAML text.

    Args:
        text: The YAML text.
        name: Name of its file, for messages.
        nested: Name an option inside a mapping by its dotted path; otherwise mappings are values.

    Raises:
        RecipeError: The text is not plain YAML, or not a mapping.
    """
    try:
        content = load(text)
    except ValueError as error:
        raise RecipeError(f"{name} is not plain YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise RecipeError(f"{name} holds {type(content).__name__}, expected options by name")
    if nested:
        options = {key: value for key, value in leaves(content) if value != {}}
    else:
        options = {str(key): value for key, value in content.items()}
    return _resolve_references({key: value for key, value in options.items() if value is not None})


def leaves(node: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the options inside nested mappings by their dotted paths; an empty mapping is an option."""
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{key}.")
        else:
            yield key, value


def _resolve_references(values: Mapping[str, object]) -> PeerOptions:
    """Fill in `${other.key}`; a value that contains any other expression stays unresolved."""
    options = PeerOptions()
    for key, raw in values.items():
        value = _referenced(key, raw, values)
        if isinstance(value, str) and "${" in value:
            options.unresolved[key] = f"its value {value!r} is computed by another program"
        elif value is not None and value != "???":
            options.values[key] = value
    return options


def _referenced(key: str, raw: object, values: Mapping[str, object]) -> object:
    """Return the value that an option's references lead to; None for a copy of a section, whose options count."""
    value = raw
    for _ in range(MAX_REFERENCES):
        reference = REFERENCE.fullmatch(value) if isinstance(value, str) else None
        if reference is None:
            break
        name, default = reference.groups()
        if name.startswith("."):
            name = ".".join([*key.split(".")[: -(len(name) - len(name.lstrip(".")))], name.lstrip(".")])
        if name in values:
            value = values[name]
        elif any(option.startswith(f"{name}.") for option in values):
            return None
        elif default is None:
            break
        else:
            value = parse_text(default.strip())
    return value
