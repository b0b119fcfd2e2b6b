"""What a peer's configuration gives, read as text: a YAML file, or the options in a shell script. Nothing is run."""

from __future__ import annotations

import ast
import math
import operator
import os
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlkit.cli.parsing.reader import MAX_BYTES, load
from rlkit.errors import RecipeError, shorten

ARITHMETIC = re.compile(r"\$\(\(((?:[^()$`]|\((?:[^()$`]|\([^()$`]*\))*\))*)\)\)")
"""A sum of numbers and variables, once those with a dollar are filled in."""
SUBSTITUTION = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
"""What a shell would run for its output."""
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+)|[@*#?$!])")
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)(?:,([^${}]*))?\}")
"""Another option of a YAML file, and what stands for it where it is not given."""
REST = re.compile(r"""["']?\$(?:\{[@*](?::\d+)?\}|[@*])["']?""")
"""A script's own arguments, handed on."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
LARGEST = 10**15
"""The largest number that an option may be; no infinity, and no NaN."""
MARK = "\ue000"
"""Stands in a value for what is not known without running something."""
LONGEST_COMMAND, MOST_LINES, LONGEST_VALUE = 20_000, 100, 2_000
"""Characters of a command, lines of a quotation, and characters of a variable that is filled in."""
DEEPEST = 5
"""Defaults inside of defaults."""
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),  # of a shell: towards 0
    ast.Mod: lambda a, b: int(math.fmod(a, b)),
}


@dataclass
class Given:
    """A peer's options by name; and by the same names, why the value of some is not known."""

    values: dict[str, object] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)

    def add(self, key: str, text: str) -> None:
        """Note an option whose value is a text of a command line; the last one counts."""
        self.values.pop(key, None)
        self.unknown.pop(key, None)
        if MARK in text or "$(" in text or "${" in text:
            self.unknown[key] = "its value is a substitution of the shell, which is not run"
        else:
            self.values[key] = plain(text)


def plain(text: str) -> object:
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
        RecipeError: It cannot be read, is larger than any configuration, or is no text.
    """
    try:
        path = Path(name)
        if not os.path.isfile(path):
            raise RecipeError(f"{shorten(name, 200)!r} is no file, expected a YAML file or a shell script")
        if (size := path.stat().st_size) > MAX_BYTES:
            raise RecipeError(f"{name} has {size:,} bytes, expected a configuration of at most {MAX_BYTES:,}")
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise RecipeError(f"{name} cannot be read: {error.strerror}") from error
    except ValueError as error:  # a NUL in the name, bytes that are not UTF-8
        raise RecipeError(f"{shorten(name, 200)!r} is no text in UTF-8: {error}") from error
    if "\0" in text or MARK in text:
        raise RecipeError(f"{name} holds a character that no configuration has (NUL or U+E000), expected plain text")
    return text


def of_yaml(text: str, name: str, nested: bool) -> Given:
    """Return the options in a YAML text.

    Args:
        text: The text.
        name: Its file, for messages.
        nested: Whether an option inside of a mapping is named by its dotted path; mappings are values otherwise.

    Raises:
        RecipeError: It is not YAML, has a tag of another language, or is no mapping.
    """
    try:
        content = load(text)
    except ValueError as error:
        raise RecipeError(f"{name} is not plain YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, Mapping):
        raise RecipeError(f"{name} holds {type(content).__name__}, expected options by name")
    leaves = _leaves(content, "") if nested else ((str(key), value) for key, value in content.items())
    values = {key: value for key, value in leaves if value is not None}
    return _interpolated(values)


def _leaves(node: Mapping[object, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{key}.")
        elif value != {}:
            yield key, value


def _interpolated(values: Mapping[str, object]) -> Given:
    """Resolve `${other.key}`; what else a text computes stays unknown."""
    found = Given()
    for key, raw in values.items():
        value = raw
        if isinstance(raw, str) and (name := REFERENCE.fullmatch(raw)) is not None:
            value = values.get(name[1], raw if name[2] is None else plain(name[2].strip()))
        if isinstance(value, str) and "${" in value:
            found.unknown[key] = f"its value {value!r} is computed by another program"
        elif value != "???":
            found.values[key] = value
    return found


def lines_of(text: str, name: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, with its variables filled in.

    Variables are those that the script itself assigns a text; `$HOME` is `~`.

    Raises:
        RecipeError: A quotation has no end, or a line is too long.
    """
    known = {"HOME": "~"}
    joined = re.sub(r"\\\r?\n", " ", text)
    pending = ""
    for number, line in enumerate(joined.splitlines(), 1):
        if not pending and line.lstrip().startswith("#"):
            continue
        pending = f"{pending}\n{line}" if pending else line
        if len(pending) > LONGEST_COMMAND or pending.count("\n") > MOST_LINES:
            raise RecipeError(f"{name}, line {number}: a command has more than {LONGEST_COMMAND:,} characters")
        try:
            words = _words(pending, known)
        except ValueError:  # a quotation that goes on in the next line
            continue
        pending = ""
        names = words[1:] if words[:1] == ["export"] else words
        if names and all(ASSIGNMENT.match(word) for word in names):
            known |= {
                key: value for key, value in (word.split("=", 1) for word in names) if len(value) <= LONGEST_VALUE
            }
        elif words:
            yield words
    if pending:
        raise RecipeError(f"{name}: a quotation is not closed: {shorten(pending.strip(), 80)!r}")


def _words(line: str, known: Mapping[str, str]) -> list[str]:
    """Return the words of a line, up to a comment; where its output goes is left out."""
    filled = REST.sub("", line)
    for _ in range(DEEPEST):  # a default may have variables in it
        filled = VARIABLE.sub(lambda found: _value(found, known), filled)
    filled = ARITHMETIC.sub(lambda found: _computed(found[1], known), filled)
    lexer = shlex.shlex(SUBSTITUTION.sub(MARK, filled), posix=True, punctuation_chars=";&|<>")
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in lexer:
        if word.startswith("#"):
            break
        if set(word) <= set(";&|<>"):
            if word[0] in "<>" and words and words[-1].isdigit():
                words.pop()
            break
        words.append(word)
    return words


def _value(found: re.Match[str], known: Mapping[str, str]) -> str:
    name, default = found[1] or found[3] or "", found[2]
    value = known.get(name)
    if value is None:  # quotes in a default are those of the script
        return MARK if default is None else default.strip('"')
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("'", "")


def _computed(text: str, known: Mapping[str, str]) -> str:
    """Return the result of a shell's sum of whole numbers; what is anything else stays unknown."""
    try:
        return str(_evaluated(ast.parse(text.strip(), mode="eval").body, known))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return MARK


def _evaluated(node: ast.expr, known: Mapping[str, str]) -> int:
    """Return the value of a tree of numbers, names, and the operators of a shell.

    Raises:
        ValueError: Something else is in it, or a number is larger than any option.
        ArithmeticError: It divides by 0.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluated(node.left, known), _evaluated(node.right, known))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluated(node.operand, known)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = int(known[node.id]) if node.id in known else int(MARK)
    else:
        raise ValueError("no sum of numbers")
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value
