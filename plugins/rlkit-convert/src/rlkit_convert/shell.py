"""The commands of a shell script, as words with variables and sums filled in. Nothing is run."""

from __future__ import annotations

import ast
import math
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from rlkit.base.errors import RecipeError, shorten
from rlkit_convert.source import LARGEST, MARK, marked, unmarked

ARITHMETIC = re.compile(r"\$\(\(((?:[^()$`]|\((?:[^()$`]|\([^()$`]*\))*\))*)\)\)")
"""Arithmetic on numbers and variables, once variables with a dollar are filled in."""
SUBSTITUTION = re.compile(r"\$\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)|`[^`]*`")
"""A command that a shell would replace by its output."""
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?[-=]([^{}]*))?\}|(\w+)|[@*#?$!])")
SCRIPT_ARGUMENTS = re.compile(r"""["']?\$(?:\{[@*](?::\d+)?\}|[@*])["']?""")
"""A script's own arguments, passed on."""
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
ARRAY = re.compile(r"^[ \t]*(?:declare -a |local |export )?([A-Za-z_]\w*)(\+?)=\((?!\()", re.MULTILINE)
"""The beginning of an array."""
ELEMENTS = re.compile(r"\$\{(\w+)\[[@*]\](?::?[-+][^{}]*)?\}")
"""All elements of an array, as words."""
ARRAY_WORD = marked("array")
"""The first word of the command that `with_arrays` reads in place of the beginning of an array."""
PUNCTUATION = ";&|<>)"
"""Characters that end a word, outside of quotes."""
MAX_INSERTED = 100_000
"""Elements of arrays that are filled in, in all commands of a script."""
MAX_COMMAND_CHARS = 20_000
MAX_QUOTED_LINES = 100
MAX_VARIABLE_CHARS = 2_000
"""Variables with a longer value are not filled in."""
MAX_DEFAULT_DEPTH = 5
"""Nesting of defaults in defaults."""
OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(math.copysign(abs(a) // abs(b), a * b)),  # as a shell divides: towards 0
    ast.Mod: lambda a, b: int(math.fmod(a, b)),
}


def commands(text: str, name: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell script, with its variables filled in.

    Variables are those to which the script itself assigns a text; `$HOME` is `~`.

    Raises:
        RecipeError: A quotation is not closed, or a command is too long.
    """
    for words in _commands(text, name):
        command = [word for word in words if word != ")"]
        if command:
            yield command


def _commands(text: str, name: str) -> Iterator[list[str]]:
    """Yield the words of each command, a closing parenthesis among them."""
    variables = {"HOME": "~"}
    joined = re.sub(r"\\\r?\n", " ", text)
    pending = ""
    for number, line in enumerate(joined.splitlines(), 1):
        if not pending and line.lstrip().startswith("#"):
            continue
        pending = f"{pending}\n{line}" if pending else line
        if len(pending) > MAX_COMMAND_CHARS or pending.count("\n") > MAX_QUOTED_LINES:
            raise RecipeError(f"{name}, line {number}: a command has more than {MAX_COMMAND_CHARS:,} characters")
        try:
            words = _split(pending, variables)
        except ValueError:  # a quotation that continues on the next line
            continue
        pending = ""
        assignments = words[1:] if words[:1] == ["export"] else words
        if assignments and all(ASSIGNMENT.match(word) for word in assignments):
            for variable, value in (word.split("=", 1) for word in assignments):
                if len(value) <= MAX_VARIABLE_CHARS:
                    variables[variable] = value
        elif words:
            yield words
    if pending:
        raise RecipeError(f"{name}: a quotation is not closed: {shorten(unmarked(pending.strip()), 80)!r}")


class ShellCommands(NamedTuple):
    """The commands of a script, with the elements of arrays in place of `${NAME[@]}`.

    Args:
        commands: The words of each command.
        missing: Arrays that commands pass and the script does not set.
        unused: Arrays of options that no command passes.
    """

    commands: list[list[str]]
    missing: list[str]
    unused: list[str]


def with_arrays(text: str, name: str) -> ShellCommands:
    """Return the commands of a shell script, in which arrays are filled in; an empty one replaces no other.

    Raises:
        RecipeError: As `commands` does, or commands pass too many elements of arrays.
    """
    filled, passed, arrays = list[list[str]](), dict[str, None](), dict[str, list[str]]()
    open_array, elements = "", list[str]()
    inserted = 0
    for command in _commands(ARRAY.sub(rf"{ARRAY_WORD} \1 '\2' ", text), name):
        words = command
        if words[0] == ARRAY_WORD:
            _, open_array, extends, *words = words
            elements = arrays.setdefault(open_array, []) if extends else []
        expanded = list[str]()
        for word in words:
            reference = ELEMENTS.fullmatch(word)
            inner = [word] if reference is None else arrays.get(reference[1], [])
            if reference is not None:
                passed[reference[1]] = None
                inserted += len(inner)
            if inserted > MAX_INSERTED:
                raise RecipeError(f"{name} passes more than {MAX_INSERTED:,} elements of arrays to commands")
            expanded += inner
        if not open_array:
            filled.append([word for word in expanded if word != ")"])
            continue
        is_last = ")" in expanded
        elements += expanded[: expanded.index(")")] if is_last else expanded
        if is_last:
            arrays[open_array] = elements or arrays.get(open_array, [])
            open_array = ""
    unused = [key for key in arrays if key not in passed and any(word.startswith("--") for word in arrays[key])]
    return ShellCommands(filled, [key for key in passed if key not in arrays], unused)


def flags(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each `--option` with its values: `--option a b`, `--option=a`, or none."""
    key, values = "", list[str]()
    for word in [*words, "--"]:
        if not word.startswith("--"):
            values.append(word)
            continue
        if key:
            yield key, values
        name, equals, value = word.removeprefix("--").partition("=")
        key, values = name.replace("-", "_"), [value] if equals else []


def _split(line: str, variables: Mapping[str, str]) -> list[str]:
    """Return the words of a line up to a comment, a redirection or another command."""
    expanded = SCRIPT_ARGUMENTS.sub("", line)
    for _ in range(MAX_DEFAULT_DEPTH):  # a default may contain variables
        expanded = VARIABLE.sub(lambda match: _variable_value(match, variables), expanded)
    expanded = ARITHMETIC.sub(lambda match: _sum_text(match, variables), expanded)
    lexer = shlex.shlex(
        SUBSTITUTION.sub(lambda match: marked(match[0]), expanded), posix=True, punctuation_chars=PUNCTUATION
    )
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    for word in lexer:
        if word.startswith("#"):
            break
        if word and set(word) <= set(PUNCTUATION):
            end = word.lstrip(")")
            words += [")"] if end != word else []
            if not end:
                continue
            if end[0] in "<>" and words and words[-1].isdigit():
                words.pop()
            break
        words.append(word)
    return words


def _variable_value(match: re.Match[str], variables: Mapping[str, str]) -> str:
    value = variables.get(match[1] or match[3] or "")
    if value is None:
        default = match[2]
        return marked(match[0]) if default is None else default.strip('"')  # the quotes in a default are the script's
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("'", "")


def _sum_text(match: re.Match[str], variables: Mapping[str, str]) -> str:
    """Return the result of a shell's arithmetic as text; marked as it stands for anything but integers."""
    try:
        return str(_evaluate(ast.parse(match[1].strip(), mode="eval").body, variables))
    except (SyntaxError, ValueError, ArithmeticError, RecursionError):
        return marked(match[0])


def _evaluate(node: ast.expr, variables: Mapping[str, str]) -> int:
    """Return the value of a syntax tree of integers, names and a shell's operators.

    Raises:
        ValueError: The tree contains anything else, or a number is too large for an option.
        ArithmeticError: It divides by 0.
    """
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        value = OPERATORS[type(node.op)](_evaluate(node.left, variables), _evaluate(node.right, variables))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluate(node.operand, variables)
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
    elif isinstance(node, ast.Name):
        value = int(variables.get(node.id, MARK))
    else:
        raise ValueError("expected integers, names and operators")
    if abs(value) > LARGEST:
        raise ValueError("too large")
    return value
