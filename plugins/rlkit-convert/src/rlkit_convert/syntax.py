"""The syntax tree of a Python script: names and the values that they are bound to. Nothing is run."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rlkit.base.errors import shorten
from rlkit.base.text import redact_option
from rlkit_convert.source import LARGEST, PeerOptions

MAX_NAMES = 20
"""Names that are followed to a value, each bound to the next."""
CONVERSIONS = {"int": int, "float": float, "str": str}


class Unknown(Exception):
    """The value of an expression is known only by running it."""


@dataclass
class Script:
    """The parts of a script.

    Args:
        bindings: The lines at which a name is bound, in order, each with its expression.
        functions: Names of the functions at the top.
        definitions: Functions that are defined once, anywhere, by name.
        imports: `module:name` by the name that the script uses.
        has_guard: Whether it tests `__name__`, so that it does not train when it is imported.
        assignments: Those to a single target, each with whether it is outside of branches and loops.
    """

    bindings: dict[str, list[tuple[int, ast.expr]]]
    functions: set[str]
    definitions: dict[str, ast.FunctionDef]
    imports: dict[str, str]
    has_guard: bool
    assignments: list[tuple[ast.Assign, bool]]

    @classmethod
    def of(cls, tree: ast.Module) -> Script:
        """Read the definitions of a syntax tree."""
        imports: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imports |= {alias.asname or alias.name: f"{node.module}:{alias.name}" for alias in node.names}
        functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        definitions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        counts = Counter(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
        once = {name: node for name, node in definitions.items() if counts[name] == 1}
        certain = {id(node) for statements in _sequences(tree) for node in statements}
        assigned = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and len(node.targets) == 1]
        assignments = [(node, id(node) in certain) for node in assigned]
        return cls(_bindings(tree), functions, once, imports, any(map(_is_guard, tree.body)), assignments)

    def resolve(self, node: ast.expr) -> ast.expr:
        """Return the expression that a name is bound to where it is used, or the node itself."""
        for _ in range(MAX_NAMES):
            bindings = self.bindings.get(node.id, []) if isinstance(node, ast.Name) else []
            earlier = [expression for line, expression in bindings if line < node.lineno]
            if not earlier:
                break
            node = earlier[-1]
        return node

    def value(self, node: ast.expr) -> object:
        """Return the value of a literal, of a name that is bound to one, or of a text or a default made of these.

        Raises:
            Unknown: It is any other expression.
        """
        resolved = self.resolve(node)
        try:
            value = ast.literal_eval(resolved)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            value = self._computed(resolved)
        if isinstance(value, int | float) and not abs(value) <= LARGEST:
            raise Unknown
        if not isinstance(value, str | int | float | list | tuple | dict | None):
            raise Unknown
        return list(value) if isinstance(value, tuple) else value

    def _computed(self, node: ast.expr) -> object:
        """Return the value of a list, a mapping, a text in parts, a conversion, or the default of a variable."""
        try:
            if isinstance(node, ast.List | ast.Tuple):
                return [self.value(item) for item in node.elts]
            if isinstance(node, ast.Attribute) and name_of(node.value) == "torch":  # torch.bfloat16
                return node.attr
            if isinstance(node, ast.Dict) and all(map(is_text, node.keys)):
                return {
                    ast.literal_eval(key): self.value(value)
                    for key, value in zip(node.keys, node.values, strict=True)
                    if key is not None
                }
            if isinstance(node, ast.JoinedStr):
                return "".join(map(self._piece, node.values))
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
                return self._text(node.left) + self._text(node.right)
            if isinstance(node, ast.Call) and is_environment(node) and len(node.args) == 2:
                return self.value(node.args[1])
            if isinstance(node, ast.Call) and not node.keywords:
                return self._converted(node)
        except (RecursionError, ValueError, TypeError) as error:
            raise Unknown from error
        raise Unknown

    def _converted(self, node: ast.Call) -> object:
        """Return the value of `int(…)`, `float(…)` or `str(…)`, or of a text without the blanks around it."""
        if isinstance(node.func, ast.Name) and node.func.id in CONVERSIONS and len(node.args) == 1:
            return CONVERSIONS[node.func.id](self.value(node.args[0]))  # type: ignore[operator]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "strip" and not node.args:
            return self._text(node.func.value).strip()
        raise Unknown

    def _piece(self, node: ast.expr) -> str:
        if isinstance(node, ast.FormattedValue) and node.conversion == -1 and node.format_spec is None:
            return str(self.value(node.value))
        return self._text(node)

    def _text(self, node: ast.expr) -> str:
        value = self.value(node)
        if not isinstance(value, str):
            raise Unknown
        return value


def is_environment(node: ast.AST) -> bool:
    """Whether an expression is `os.environ.get(…)` or `os.getenv(…)`."""
    if not isinstance(node, ast.Call):
        return False
    owner = node.func.value if isinstance(node.func, ast.Attribute) else node.func
    return name_of(node.func) == "getenv" or (name_of(node.func) == "get" and name_of(owner) == "environ")


def _bindings(tree: ast.Module) -> dict[str, list[tuple[int, ast.expr]]]:
    """Return the bindings of names that are bound in one sequence of statements, outside of branches and loops."""
    names = Counter(node.arg for node in ast.walk(tree) if isinstance(node, ast.arg))
    names.update(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    bindings: dict[str, list[tuple[int, ast.expr]]] = {}
    for statements in _sequences(tree):
        own: dict[str, list[tuple[int, ast.expr]]] = {}
        for node in statements:
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                own.setdefault(node.targets[0].id, []).append((node.end_lineno or node.lineno, node.value))
        bindings |= {name: lines for name, lines in own.items() if len(lines) == names[name]}
    return bindings


def _sequences(tree: ast.Module) -> Iterator[list[ast.stmt]]:
    """Yield the statements of the script itself, with those that run if it is the main module, and of each function."""
    top: list[ast.stmt] = []
    for node in tree.body:
        top += node.body if isinstance(node, ast.If) and _is_guard(node) else [node]
    yield top
    yield from (node.body for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test)


def text_of(node: ast.AST) -> str:
    """Return an expression as text, shortened."""
    try:
        return shorten(ast.unparse(node), 80)
    except RecursionError:
        return "an expression of thousands of parts"


def name_of(node: ast.expr) -> str:
    """Return the last part of a dotted name; empty for any other expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def arguments(call: ast.Call, script: Script, names: Sequence[str] = ()) -> Iterator[tuple[str, ast.expr]]:
    """Yield a call's arguments by name: those by position, by keyword, and of a dictionary that is unpacked."""
    yield from zip(names, call.args, strict=False)
    for keyword in call.keywords:
        unpacked = script.resolve(keyword.value)
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
        elif isinstance(unpacked, ast.Dict) and all(map(is_text, unpacked.keys)):
            yield from (
                (str(ast.literal_eval(key)), value) for key, value in zip(unpacked.keys, unpacked.values, strict=True)
            )
        else:
            yield f"**{ast.unparse(keyword.value)}", ast.Call(ast.Name("dict"), [], [keyword])


def is_text(node: ast.expr | None) -> bool:
    """Whether an expression is a text."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def add(options: PeerOptions, script: Script, key: str, node: ast.expr) -> None:
    """Set an option to the value of an expression, unless that is None; record why it is unknown."""
    try:
        value = script.value(node)
    except Unknown:
        expression = redact_option(key, text_of(node))
        options.unresolved[key] = f"its value is `{expression}`, which is not run"
        return
    if value is None:
        return
    options.values[key] = value
    variables = [ast.unparse(part) for part in ast.walk(script.resolve(node)) if is_environment(part)]
    if variables:
        options.remarks[key] = f"the default of `{shorten(variables[0], 80)}`; the variable is not read"
